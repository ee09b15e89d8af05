# SPDX-License-Identifier: Apache-2.0
"""Module path of `DiffusionGPUModelRunner` that other integrations import."""

from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

__all__ = ["DiffusionGPUModelRunner"]
