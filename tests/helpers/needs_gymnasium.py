# SPDX-License-Identifier: Apache-2.0
"""A file that imports this module first has its tests skipped if gymnasium is missing."""

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium: pip install '.[env]'")
