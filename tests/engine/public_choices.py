# SPDX-License-Identifier: Apache-2.0
"""`omni.model` as other public implementations serve LingBot World and Lance, for tests that run with all of it.

That these are what the models' notes and options say is held by tests/model_executor/models/lingbot_world/
test_lingbot_config.py and tests/model_executor/models/lance/test_lance_choices.py.
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
LANCE_ALTERNATIVES: dict[str, str] = {
    "drawing_prompt": "wrapped",
    "uncond_context": "empty",
    "edit_apostrophe": "ascii",
    "uncond_positions": "own",
    "i2v_renorm": "unpinned",
    "i2v_noise_place": "before_text",
    "understanding_video": "smart_resize",
    "understanding_vit_time": "origin",
    "position_table": "checkpoint",
    "reference_latent": "sample",
    "vision_weights": "bundled",
    "pixel_rounding": "truncate",
}
"""Each choice that is not the original's."""
