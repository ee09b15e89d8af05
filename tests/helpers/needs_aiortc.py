# SPDX-License-Identifier: Apache-2.0
"""Import this module first: the tests of a file are skipped if aiortc is missing."""

import pytest

aiortc = pytest.importorskip("aiortc", reason="needs aiortc: pip install '.[webrtc]'")
aioice = pytest.importorskip("aioice")  # aiortc depends on it
