# SPDX-License-Identifier: Apache-2.0
"""A file that imports this module first has its tests skipped if aiortc is missing."""

import pytest

aiortc = pytest.importorskip("aiortc", reason="needs aiortc: pip install '.[webrtc]'")
aioice = pytest.importorskip("aioice")  # aiortc depends on it
