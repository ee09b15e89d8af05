# SPDX-License-Identifier: Apache-2.0
"""`ModelOptions`: options under `omni.model` of every model that this package runs itself.

A model adds its own in a subclass of its `config.py`. Held by the tests of those.
"""

from typing import Literal

import msgspec
import torch


class ModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options of every model.

    vae_dtype: type of the VAE; None = the transformer's.
    sequence_parallel: use the tensor-parallel ranks for Ulysses sequence parallelism instead.
    compile: fuse elementwise chains and streaming decoders with torch.compile, for every size when
        it is first seen (the largest at start), but for those that have kernels on CUDA: the Wan
        transformers' chains, and the Wan VAE's decoder in half precision. None = on CUDA, unless
        the engine runs with --enforce-eager.
    """

    vae_dtype: Literal["fp32", "bf16"] | None = None
    sequence_parallel: bool = False
    compile: bool | None = None

    def vae_torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, None: model_dtype}[self.vae_dtype]
