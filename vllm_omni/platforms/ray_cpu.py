# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with a Ray resource; see `vllm_omni.platforms`."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """CPU platform whose workers each use one unit of Ray's `GPU` resource.

    `ray start --num-gpus N` creates N units even without a GPU. The resource must be named `GPU`,
    because vLLM queries Ray for an actor's units, and Ray reports units only for accelerators that
    it supports.
    """

    ray_device_key = "GPU"
