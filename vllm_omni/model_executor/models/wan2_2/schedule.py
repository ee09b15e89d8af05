# SPDX-License-Identifier: Apache-2.0
"""Creates a request's noise schedule and solver: diffusers' scheduler with the checkpoint's
config.
"""

from collections.abc import Mapping
from typing import Any

import torch


def new_scheduler(
    values: Mapping[str, Any],
    num_inference_steps: int,
    flow_shift: float | None,
    device: torch.device,
) -> Any:
    """Return a new scheduler, positioned at its first step.

    Args:
        values: Content of `scheduler_config.json`, for a class in `checkpoint.SCHEDULERS`.
        num_inference_steps: Number of denoise steps.
        flow_shift: Shift of the noise schedule, or None for the value in the config.
        device: Device of the timesteps.
    """
    import diffusers

    own = {key: value for key, value in values.items() if not key.startswith("_")}
    shift_key = "flow_shift" if values["_class_name"] == "UniPCMultistepScheduler" else "shift"
    if flow_shift is not None:
        own[shift_key] = flow_shift
    scheduler = getattr(diffusers, values["_class_name"]).from_config(own)
    scheduler.set_timesteps(num_inference_steps, device=device)
    scheduler.set_begin_index(0)
    return scheduler
