# SPDX-License-Identifier: Apache-2.0
"""`omni.model` as other public implementations serve LingBot World, for tests that run with all of it.

That these are what the model's notes and options say is held by tests/model_executor/models/lingbot_world/
test_lingbot_config.py.
"""

from typing import Any

SGLANG: dict[str, Any] = {
    "later_condition": "second_chunk",
    "camera_first_frame": "stands",
    "camera_scale": "session_max",
    "camera_dtype": "bf16",
}
PR3701: dict[str, Any] = {
    "later_condition": "fresh_grey",
    "vae_continuation": "restart",
    "camera_first_frame": "stands_each_chunk",
    "camera_scale": "chunk_max",
    "prompt_switch": "ignore",
}
"""But for its schedule and its window."""
