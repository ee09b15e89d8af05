# SPDX-License-Identifier: Apache-2.0
"""vllm_omni: video world models, streaming video and unified image/video models on stock vLLM.

Importing this package does not modify vLLM. `register()` is the `vllm.general_plugins` entry point:
vLLM calls it in every process, possibly twice. `register()` only adds entries to vLLM's public
registries (tests/test_import_purity.py).
"""

import os

# Probing for a GPU must not initialize CUDA in a process that forks an engine later. vLLM also sets
# this variable on import, but diffusers may be imported before vLLM and probes for a GPU on import.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def register() -> None:
    """Register model classes, the config parser and the config hooks with vLLM. Idempotent."""
    from vllm_omni.registration import register_with_vllm

    register_with_vllm()
