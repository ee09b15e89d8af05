# SPDX-License-Identifier: Apache-2.0
"""Keys of the free camera. The keys have their own module so that clients need not import torch."""

from typing import Final

CAMERA_KEYS: Final = "wasdijkl"
"""`w`, `s`, `a` and `d` move forward, back, left and right. `i`, `k`, `j` and `l` look up, down,
left and right."""
