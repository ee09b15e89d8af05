# SPDX-License-Identifier: Apache-2.0
"""The options page lists every option and describes its effect."""

from typing import Annotated, Literal

import msgspec
import pytest
import snippets as docs
from helpers.scripts import load_script

script = load_script(docs.REPO / "scripts" / "options.py")


def test_the_page_is_what_the_script_makes() -> None:
    assert script.PAGE.read_text() == script.render(), "run: python scripts/options.py"


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
