# SPDX-License-Identifier: Apache-2.0
"""The options page lists every option with its effect, and does not grow by accident."""

from typing import Annotated, Literal

import msgspec
import pytest
import snippets as docs
from helpers.scripts import load_script

MOST = {"LingBot World": 14, "Causal Wan": 18, "in all": 71}
"""Options of a streaming model, and of the package: a new one needs a user, and another number
here.
"""


script = load_script(docs.REPO / "scripts" / "options.py")


def test_the_page_is_what_the_script_makes() -> None:
    assert script.PAGE.read_text() == script.render(), "run: python scripts/options.py"


def test_no_option_more_than_there_were() -> None:
    for model in ("LingBot World", "Causal Wan"):
        assert len(script.rows(script.load(script.MODELS[model]))) <= MOST[model]
    assert script.total() <= MOST["in all"]


def test_an_option_without_a_text_is_an_error() -> None:
    class Options(msgspec.Struct):
        """Some.

        named, other: both do it; `hidden` too.
        """

        named: bool = False
        other: Literal["a", "b"] = "a"
        hidden: int | None = None
        bounded: Annotated[float, msgspec.Meta(gt=0, le=2000)] | None = None
        """Bound in metres.
        Default: none."""

    assert script.rows(Options) == [
        ("named", "false", "true or false", "both do it; `hidden` too."),
        ("other", "`a`", "`a`, `b`", "both do it; `hidden` too."),
        ("hidden", "none", "integer or none", "see `other`"),
        ("bounded", "none", "number > 0, <= 2,000 or none", "Bound in metres. Default: none."),
    ]

    class Silent(msgspec.Struct):
        """Says nothing of it."""

        silent: bool = False

    with pytest.raises(ValueError, match=r"Silent\.silent: no text"):
        script.rows(Silent)
