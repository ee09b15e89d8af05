# SPDX-License-Identifier: Apache-2.0
"""Skips all tests in a file if schemathesis is missing. The file must import this module first."""

import pytest

schemathesis = pytest.importorskip(
    "schemathesis", reason="needs schemathesis: pip install '.[dev]'"
)
