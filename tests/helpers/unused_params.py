# SPDX-License-Identifier: Apache-2.0
"""Parameters of requests to image and video models. No streaming model accepts these parameters."""

from typing import Any, Final

IMAGE_AND_VIDEO_PARAMS: Final[dict[str, Any]] = {
    "negative_prompt": "fog",
    "num_frames": 9,
    "num_inference_steps": 9,
    "guidance_scale": 5.0,
    "num_images": 2,
    "fps": 8.0,
}
