# SPDX-License-Identifier: Apache-2.0
"""Import first: without schemathesis the tests of a file are skipped, with its name."""

import pytest

schemathesis = pytest.importorskip(
    "schemathesis", reason="needs schemathesis: pip install '.[dev]'"
)
