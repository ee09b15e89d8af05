# SPDX-License-Identifier: Apache-2.0
"""The keys of a camera that flies. A module of its own, so that clients need no torch for them."""

from typing import Final

CAMERA_KEYS: Final = "wasdijkl"
"""`w s a d` move forward, back, left, right; `i k` look up and down, `j l` left and right."""
