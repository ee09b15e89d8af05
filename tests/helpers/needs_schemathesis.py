# SPDX-License-Identifier: Apache-2.0
"""Import this module first: the tests of a file are skipped if schemathesis is missing."""

import pytest

schemathesis = pytest.importorskip(
    "schemathesis", reason="needs schemathesis: pip install '.[dev]'"
)
