# SPDX-License-Identifier: Apache-2.0
"""A file that imports this module first has its tests skipped if schemathesis is missing."""

import pytest

schemathesis = pytest.importorskip(
    "schemathesis", reason="needs schemathesis: pip install '.[dev]'"
)
