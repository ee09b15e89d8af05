# SPDX-License-Identifier: Apache-2.0
"""Check and time the Wan VAE's encoding of a start image (`StreamingWanVAE`) on one GPU.

The encoder runs as in the server, but without an engine.

    python benchmarks/vae_encode.py
    python benchmarks/vae_encode.py --release 2.2    # at 704x1280
    python benchmarks/vae_encode.py --height 48 --width 80 --base-dim 4    # the checks, on a CPU

The weights are random and in bf16. Frames are 480x832 pixels. The input consists of the image and
eight grey frames, which encode to the three latent frames of a world's first chunk. The benchmark
reports the errors of the fused and the plain encoder against fp32, the median times of both
encoders, and the kernels of the fused encoder. The exit status is 1 if the fused encoder's error is
more than 1.2 times the plain encoder's error.
"""

import argparse
import sys
from typing import Any

import torch
from common import add_output_arguments, save
from kernel_timing import milliseconds
from vae_decode import (
    DEVICE,
    DTYPE,
    add_network_arguments,
    kernels,
    parse_network,
    relative,
    with_random_weights,
)

from vllm_omni.model_executor.models.wan.vae import stacked_frames
from vllm_omni.model_executor.models.wan.vae.fused_encoder import FusedEncoder, fused_encoder
from vllm_omni.model_executor.models.wan.vae.fused_layers import FusedPasses
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig


def fuse(encoder: Any) -> FusedEncoder | None:
    if DEVICE == "cuda":
        return fused_encoder(encoder)
    return FusedEncoder(encoder, FusedPasses(stacked_frames.stack_frames, stacked_frames.add_up))


def build(config: VAEConfig, dtype: torch.dtype = DTYPE, *, fused: bool = False) -> StreamingWanVAE:
    """Return an encoder with random weights that depend only on `config`."""
    with torch.device(DEVICE):
        vae = StreamingWanVAE(
            config,
            decoder=False,
            dtype=dtype,
            fuse_encoder=fuse if fused else lambda _: None,
        )
    return with_random_weights(vae)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_network_arguments(parser)
    add_output_arguments(parser)
    args = parse_network(parser)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    frames = torch.zeros(1, 3, 9, args.height, args.width)
    frames[:, :, 0] = (
        torch.rand(3, args.height, args.width, generator=torch.Generator().manual_seed(1)) * 2 - 1
    )
    frames = frames.to(DEVICE)
    result: dict[str, Any] = {}
    with torch.inference_mode():
        exact = build(args.config, torch.float32).encode(frames, None)[0]
        for name, fused in (("plain", False), ("fused", True)):
            vae = build(args.config, fused=fused)
            result[f"{name}_error"] = relative(vae.encode(frames, None)[0], exact)
            if DEVICE == "cuda":
                result[f"{name}_ms"] = milliseconds(lambda vae=vae: vae.encode(frames, None))
        if DEVICE == "cuda":
            result["fused_image_ms"] = milliseconds(lambda: vae.encode(frames[:, :, :1], None))
            result["fused_kernels_ms"] = kernels(lambda: vae.encode(frames, None))
    save(f"vae_encode_{args.release}", {"result": result}, args)
    sys.exit(result["fused_error"] > 1.2 * result["plain_error"] + 1e-5)


if __name__ == "__main__":
    main()
