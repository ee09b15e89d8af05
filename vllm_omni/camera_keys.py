# SPDX-License-Identifier: Apache-2.0
"""Keys of the free camera. A separate module, so that clients can import it without torch."""

from typing import Final

CAMERA_KEYS: Final = "wasdijkl"
"""`w s a d` move forward, back, left, right; `i k` look up and down, `j l` left and right."""
