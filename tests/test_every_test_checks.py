# SPDX-License-Identifier: Apache-2.0
"""A test says what must hold: it asserts, or calls a helper of the suite that does."""

from pathlib import Path

import pytest
from unchecked import Suite

TESTS = Path(__file__).parent


def test_no_test_checks_nothing() -> None:
    """`python tests/unchecked.py` lists those that do; give each an assertion, or delete it.

    No exceptions.
    """
    assert Suite(TESTS).unchecked() == []


CHECKED = {
    "its own assert": "def test_it():\n    assert f()",
    "an error that it expects": "import pytest\ndef test_it():\n    with "
    "pytest.raises(ValueError):\n        f()",
    "a status of a program": "import subprocess\ndef test_it():\n    subprocess.run(['true'], "
    "check=True)",
    "a library's assertion": "import torch\ndef test_it():\n    "
    "torch.testing.assert_close(f(), g())",
    "a nested function": "def test_it():\n    def call(x):\n        assert x\n    run(call)",
    "a helper's helper": "def a(x):\n    assert x\ndef b(x):\n    a(x)\ndef test_it():\n    b(f())",
    "an imported helper": "from helpers import must\ndef test_it():\n    must(f())",
    "a helper of an imported module": "import helpers\ndef test_it():\n    helpers.must(f())",
    "an imported error that is an "
    "AssertionError": "from helpers import refuse\ndef test_it():\n    refuse(f())",
    "a method of an "
    "imported class": "from helpers import make\ndef test_it():\n    make().expect(1)",
    "a context manager": "from helpers import Guard\ndef test_it():\n    with Guard():\n   "
    "     f()",
    "a fixture that it calls": "def test_it(must_be):\n    must_be(f())",
    "a table of checks": "def a(x):\n    assert x\nALL = [a]\ndef test_it():\n    for x in ALL:\n  "
    "      x(f())",
    "a method of a class of tests": "class TestAll:\n    def test_it(self):\n        assert f()",
}
UNCHECKED = {
    "a call": "def test_it():\n    f()",
    "an error of its own": "def test_it():\n    def fail():\n        raise ValueError\n    "
    "run(fail)",
    "errors kept quiet": "import contextlib\ndef test_it():\n    with "
    "contextlib.suppress(ValueError):\n        f()",
    "a helper that checks nothing": "def a(x):\n    a(x)\ndef test_it():\n    a(f())",
    "a helper of somebody else": "def a(x):\n    assert x\ndef test_it():\n    b(f())",
    "a fixture that it does not use": "def test_it(must_be):\n    f()",
    "a status that nobody reads": "import subprocess\ndef test_it():\n    subprocess.run(['true'], "
    "check=False)",
    "a client whose construction checks "
    "something": "from helpers import Client\ndef test_it():\n    Client()",
    "a class of tests": "class TestAll:\n    def test_it(self):\n        f()",
}
HELPERS = """
class Wrong(AssertionError): pass
class Guard:
    def __exit__(self, *exception):
        must(self)
class Client:
    def __init__(self):
        assert self
    def expect(self, value):
        must(value)
def make(): return Client()
def must(x):
    assert x
def refuse(x):
    if not x:
        raise Wrong("it is not so")
"""
CONFTEST = "def must_be():\n    def check(x):\n        assert x\n    return check\n"


@pytest.mark.parametrize(
    ("source", "is_checked"),
    [pytest.param(text, True, id=name) for name, text in CHECKED.items()]
    + [pytest.param(text, False, id=name) for name, text in UNCHECKED.items()],
)
def test_what_counts_as_a_check(tmp_path: Path, source: str, is_checked: bool) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_some.py").write_text(source + "\n")
    name = "TestAll::test_it" if "class TestAll" in source else "test_it"
    assert Suite(tmp_path).unchecked() == ([] if is_checked else [f"inner/test_some.py::{name}"])
