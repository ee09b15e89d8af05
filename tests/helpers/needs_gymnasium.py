# SPDX-License-Identifier: Apache-2.0
"""Import this module first: the tests of a file are skipped if gymnasium is missing."""

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium: pip install '.[env]'")
