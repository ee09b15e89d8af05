# SPDX-License-Identifier: Apache-2.0
"""Import first: without gymnasium the tests of a file are skipped, with its name."""

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium: pip install '.[env]'")
