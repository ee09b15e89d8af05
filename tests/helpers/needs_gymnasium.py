# SPDX-License-Identifier: Apache-2.0
"""Skips all tests in a file if gymnasium is missing. The file must import this module first."""

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium: pip install '.[env]'")
