# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with a Ray resource to count workers by; see `vllm_omni.platforms`."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """One unit of Ray's `GPU` resource = one worker. `ray start --num-gpus N` makes N units without any GPU.

    It must be `GPU`: vLLM asks Ray which units an actor got, and Ray answers that for accelerators it knows only.
    """

    ray_device_key = "GPU"
