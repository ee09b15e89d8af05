# SPDX-License-Identifier: Apache-2.0
"""`ModelOptions`: the options under `omni.model` that all models in this package share.

Each model adds its own options in a subclass, in its `config.py`.
"""

from typing import Literal

import msgspec
import torch


class ModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options that all models in this package support."""

    vae_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the VAE. Default: the dtype of the transformer."""
    sequence_parallel: bool = False
    """Use the tensor-parallel ranks for Ulysses sequence parallelism."""
    compile: bool | None = None
    """Compile pointwise ops and streaming decoders with torch.compile: the largest size at startup,
    and other sizes on first use. On CUDA, the pointwise ops of the Wan transformers and the
    half-precision decoder of the Wan VAE run in this package's own kernels and are not compiled.
    Default: true on CUDA, unless the engine runs with --enforce-eager.
    """

    def vae_torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, None: model_dtype}[self.vae_dtype]
