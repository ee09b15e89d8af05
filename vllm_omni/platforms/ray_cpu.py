# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with a Ray resource; see `vllm_omni.platforms`."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """CPU platform on which each worker uses one unit of Ray's `GPU` resource.

    `ray start --num-gpus N` creates N units even without a GPU. The resource must be named `GPU`,
    because vLLM asks Ray which units an actor has, and Ray reports them only for known
    accelerators.
    """

    ray_device_key = "GPU"
