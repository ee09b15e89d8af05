# SPDX-License-Identifier: Apache-2.0
"""Provides `DiffusionGPUModelRunner` at the module path that other integrations import."""

from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

__all__ = ["DiffusionGPUModelRunner"]
