# SPDX-License-Identifier: Apache-2.0
"""Replaces SGLang kernels whose compiled packages cannot be loaded.

sglang-kernel 0.4.10 is built for torch 2.14. Its libraries do not load under torch 2.11 because a
symbol is missing. FlashInfer and CuTe DSL are not installed because they are several hundred
megabytes each. The realtime path uses five operations from these packages. This module replaces
these operations with SGLang's own kernels in CUDA C++ or Triton, and with FlashAttention 3 from
fa3-fwd. All other names of `sgl_kernel` can be imported but not called.
"""

import glob
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path

calls: Counter[str] = Counter()
"""Number of calls to each replaced operation."""
REPLACED = [
    "RMSNorm: SGLang's CUDA kernel instead of sglang-kernel's",
    "RoPE: SGLang's CUDA kernel instead of FlashInfer's",
    "FlashAttention 3: fa3-fwd instead of sglang-kernel's build of the same kernel",
    "residual + LayerNorm + modulation: SGLang's Triton kernel instead of its CuTe DSL kernel",
]


class Uncallable:
    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **options):
        raise RuntimeError(f"{self.name} has no replacement in benchmarks/peers")


class KernelModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.4.10"

    def __getattr__(self, name):
        if name.startswith("__") or self.__name__ == "sgl_kernel.scalar_type":
            raise AttributeError(name)  # SGLang uses its own types if scalar_type is missing
        return REPLACEMENTS.get(name) or Uncallable(f"{self.__name__}.{name}")


class KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return KernelModule(spec.name)

    def exec_module(self, module):
        pass


def rmsnorm(x, weight, eps=1e-6, out=None, enable_pdl=None):
    import torch
    from sglang.kernels.ops.layernorm import norm

    calls["RMSNorm"] += 1
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    norm.rmsnorm(x, weight, out, eps)
    return out


def fused_add_rmsnorm(x, residual, weight, eps=1e-6, enable_pdl=None):
    from sglang.kernels.ops.layernorm import norm

    calls["RMSNorm"] += 1
    norm.fused_add_rmsnorm(x, residual, weight, eps)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    return_softmax_lse=False,
    out=None,
    **defaults,
):
    """Run FlashAttention 3 through fa3-fwd's operator, because fa3-fwd's Python function also
    records gradients.
    """
    import fa3_fwd_interface  # noqa: F401  registers the operator
    import torch

    calls["FlashAttention 3"] += 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # The arguments are in the order of `_flash_attn_forward`'s parameters in that module: inputs,
    # lengths, nine tensors that are not needed (pages, RoPE and scales), and settings.
    inputs = (q, k, v, None, None, None, out, cu_seqlens_q, cu_seqlens_k)
    lengths = (None, None, None, max_seqlen_q, max_seqlen_k)
    settings = (scale, causal, *window_size, 0, softcap, False, None, 1, None, 0)
    attended = torch.ops.fa3_fwd.fwd(*inputs, *lengths, *[None] * 9, *settings)
    return tuple(attended[:2]) if return_softmax_lse else attended[0]


REPLACEMENTS = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "flash_attn_varlen_func": flash_attn_varlen_func,
}


def install():
    """Replace the kernels. Call this before SGLang's layers are imported."""
    find_cuda()
    sys.meta_path.insert(0, KernelFinder())
    import sglang.kernels.ops.diffusion as ops

    for name, owner in ops._EXPORTS.items():
        if "cutedsl" in owner:
            usable = name.startswith("can_use")
            setattr(ops, name, (lambda *_, **__: False) if usable else Uncallable(name))
    ops.fused_scale_residual_norm_scale_shift = residual_norm
    ops.fused_norm_scale_shift = norm_scale_shift
    from sglang.kernels.ops.attention.rope import apply_rope_inplace
    from sglang.multimodal_gen.runtime.layers.rotary_embedding import utils

    def rope(positions, query, key, head_size, cos_sin_cache, is_neox=True):
        calls["RoPE"] += 1
        q, k = (x.view(len(x), -1, head_size) for x in (query, key))
        apply_rope_inplace(q, k, cos_sin_cache, positions, is_neox=is_neox)

    utils.flashinfer_apply_rope_inplace = rope


def residual_norm(residual, x, gate, weight, bias, scale, shift, norm_type, eps=1e-5):
    import sglang.kernels.ops.diffusion as ops

    calls["residual + LayerNorm"] += 1
    if norm_type != "layer" or scale.numel() not in (1, x.shape[-1]):
        raise RuntimeError(f"{norm_type} norm with a scale of {tuple(scale.shape)} is not replaced")
    return ops.fused_scale_residual_norm_scale_shift_triton(
        residual=residual,
        x=x,
        gate=1 if gate is None else gate,
        weight=weight,
        bias=bias,
        scale=scale,
        shift=shift,
        eps=eps,
    )


def norm_scale_shift(x, weight, bias, scale, shift, norm_type, eps=1e-5):
    """Normalise before the output projection. Plain torch is fast enough, because this function
    runs once per forward pass.
    """
    import torch

    calls["LayerNorm"] += 1
    weight, bias = (None if value is None else value.float() for value in (weight, bias))
    y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    if scale.dim() == 4:  # one scale per frame
        y = y.unflatten(1, (scale.shape[1], -1))
    y = y * (1 + scale.float()) + shift.float()
    return (y.flatten(1, 2) if scale.dim() == 4 else y).to(x.dtype)


def find_cuda():
    """Set the environment variables that SGLang needs to compile its CUDA kernels when they are
    first used.
    """
    toolkits = [
        path for path in sorted(glob.glob("/usr/local/cuda*")) if Path(path, "bin").is_dir()
    ]
    if toolkits:
        os.environ.setdefault("CUDA_HOME", toolkits[0])
    folders = [f"{path}/nvidia/cu13/lib/libcudart.so*" for path in sys.path]
    libraries = [file for folder in folders for file in glob.glob(folder)]
    if libraries:  # torch's copy lacks the name that the linker searches for
        folder = tempfile.mkdtemp(prefix="peers_cudart_")
        os.symlink(libraries[0], f"{folder}/libcudart.so")
        os.environ["LIBRARY_PATH"] = f"{folder}:{os.environ.get('LIBRARY_PATH', '')}"
