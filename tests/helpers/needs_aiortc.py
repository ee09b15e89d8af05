# SPDX-License-Identifier: Apache-2.0
"""Skips all tests in a file if aiortc is missing. The file must import this module first."""

import pytest

aiortc = pytest.importorskip("aiortc", reason="needs aiortc: pip install '.[webrtc]'")
aioice = pytest.importorskip("aioice")  # a dependency of aiortc
