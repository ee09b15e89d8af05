# SPDX-License-Identifier: Apache-2.0
"""Draws squares into the null world's frames to show the received actions. Tests can read the
actions even after the frames have passed through codecs and browsers.

Each square is 8 x 8 pixels. A frame has one square per button, one per axis and one for the wheel,
in the order of the action space. The squares fill the bottom of the frame from left to right, and
then the rows above. The square of a held button is white, and that of a released button is black.
At rest, the square of an axis or the wheel has grey value 128. Moving the axis or the wheel changes
this grey value by up to 127. If an axis has a limited range, its value is scaled so that the
largest value of the range changes the grey value by 127. If the range is unlimited, the axis value
is added unscaled. A chunk without any action has no squares.
"""

import numpy as np
import torch

from vllm_omni.actions import ActionFrames, ActionSpace, Axis

SIDE = 8
_ENDLESS = 1e6


def is_idle(rows: ActionFrames | None) -> bool:
    return rows is None or not (rows.buttons_NB.any() or rows.axes_NA.any() or rows.scroll_N.any())


def levels(space: ActionSpace, rows: ActionFrames) -> np.ndarray:
    """Return the grey values of the squares for each row of controls, uint8 [N, squares]."""
    buttons_NB = rows.buttons_NB.to(torch.float32) * 255
    gains_A = torch.tensor([_gain(axis) for axis in space.axes])
    values_NV = torch.cat([rows.axes_NA * gains_A, rows.scroll_N[:, None] * 127], 1)
    gray_NV = 128 + values_NV.round().clamp(-127, 127)
    return torch.cat([buttons_NB, gray_NV], 1).to(torch.uint8).numpy()


def draw(frames_THWC: torch.Tensor, space: ActionSpace, rows: ActionFrames) -> None:
    """Draw the squares for T rows of controls into T uint8 frames."""
    for position, gray_T in enumerate(torch.from_numpy(levels(space, rows)).unbind(1)):
        top, left = _corner(position, *frames_THWC.shape[1:3])
        frames_THWC[:, top : top + SIDE, left : left + SIDE] = gray_T[:, None, None, None]


def read(frame_HWC: np.ndarray, count: int) -> list[int]:
    """Return the grey values at the centres of the first `count` squares of a frame."""
    corners = [_corner(position, *frame_HWC.shape[:2]) for position in range(count)]
    return [
        round(float(frame_HWC[top + 2 : top + 6, left + 2 : left + 6].mean()))
        for top, left in corners
    ]


def _corner(position: int, height: int, width: int) -> tuple[int, int]:
    row, column = divmod(position, width // SIDE)
    return height - SIDE * (row + 1), column * SIDE


def _gain(axis: Axis) -> float:
    largest = max(abs(axis.low), abs(axis.high))
    return 1.0 if largest >= _ENDLESS else 127 / largest
