# SPDX-License-Identifier: Apache-2.0
"""vllm_omni: video world models, streaming video and unified image/video models on stock vLLM.

Importing this package changes nothing in vLLM. `register()` is the `vllm.general_plugins` entry point: vLLM calls it in
every process, possibly twice, and it only adds entries to vLLM's public registries (tests/test_import_purity.py).
"""

import os

# Asking torch whether there is a GPU must not start CUDA in a process that forks an engine later. vLLM sets this too
# when it is imported, which is too late for whoever imports diffusers (it asks) before vLLM.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def register() -> None:
    """Register model classes, the checkpoint config parser and the config hooks with vLLM; idempotent."""
    from vllm_omni.registration import register_with_vllm

    register_with_vllm()
