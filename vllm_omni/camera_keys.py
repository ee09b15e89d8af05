# SPDX-License-Identifier: Apache-2.0
"""Free-camera keys. They have their own module so clients do not have to import torch."""

from typing import Final

CAMERA_KEYS: Final = "wasdijkl"
"""`w`, `s`, `a` and `d` move forward, back, left and right. `i`, `k`, `j` and `l` look up, down,
left and right.
"""
