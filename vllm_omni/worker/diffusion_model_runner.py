# SPDX-License-Identifier: Apache-2.0
"""`DiffusionGPUModelRunner` under the module path that other integrations name."""

from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

__all__ = ["DiffusionGPUModelRunner"]
