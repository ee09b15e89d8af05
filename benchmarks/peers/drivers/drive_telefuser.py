# SPDX-License-Identifier: Apache-2.0
"""Runs LingBot World Fast with TeleFuser 0.1.0.post3's pipeline.

    recipe   TeleFuser's streaming example, with a sliding window and attention sinks; eager,
             PyTorch SDPA
    best     FlashAttention 3 through TeleFuser's `attention`, channels-last VAE, torch.compile

The released pipeline has no options for attention or compilation. `best` combines parts of the
package in the same way as TeleFuser's later code.
"""

import importlib.machinery
import os
import sys
import types
from typing import Any

import driver
import numpy
import torch
from driver import DTYPE


def provide_flash_attention(args):
    """Provide fa3-fwd under the name that TeleFuser imports, and return whether it can be used.

    TeleFuser looks for FlashAttention 3 only if a `flash_attn` module exists.
    """
    if args.tiny:
        return False
    from fa3_fwd_interface import flash_attn_func

    def attend(q, k, v, return_softmax_lse=False, **options):
        return flash_attn_func(q, k, v, return_attn_probs=return_softmax_lse, **options)

    for name, members in {
        "flash_attn": {"__path__": []},
        "flash_attn_interface": {"flash_attn_func": attend},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(sys.modules[name]).update(members)
    return True


def main():
    args = driver.parse_arguments("best", "recipe")
    best = args.variant == "best"
    flash = best and provide_flash_attention(args)
    from telefuser.core.config import AttentionConfig, AttnImplType, CompileConfig
    from telefuser.models import lingbot_world_fast_dit as transformer_module
    from telefuser.models.wan_video_vae import VideoVAE, WanVideoVAE
    from telefuser.ops.attention import attention_impl, backends
    from telefuser.pipelines.lingbot_world_fast import denoising, pipeline, session
    from telefuser.platforms import current_platform
    from telefuser.utils.model_weight import init_weights_on_device
    from telefuser.utils.torch_compile import set_global_compile_configs

    sys.modules.pop("flash_attn", None)  # other packages must not find it
    if flash and not backends.FLASH_ATTN_3_AVAILABLE:
        raise SystemExit("TeleFuser did not find FlashAttention 3")
    sizes: dict[str, Any] = {"in_dim": 36, "num_layers": 40}
    if args.tiny:
        sizes |= {"num_layers": 2, "dim": 256, "num_heads": 2, "ffn_dim": 512, "text_dim": 64}
    with init_weights_on_device("meta"):
        transformer = transformer_module.LingBotWorldFastDiT(
            patch_size=(1, 2, 2),
            text_len=512,
            control_type="cam",
            local_attn_size=args.window,
            sink_size=args.sink,
            **sizes,
        )
        vae = WanVideoVAE()
        if args.tiny:
            vae.model = VideoVAE(dim=16, z_dim=16)
    parameters = driver.fill_with_random_weights(transformer, args.device, DTYPE)
    driver.fill_with_random_weights(vae, args.device, DTYPE)
    for module in (transformer, vae):
        module.eval().requires_grad_(False)

    class Pipeline(pipeline.LingBotWorldFastPipeline):
        def encode_prompt(self, prompt):
            return driver.random_text(args.device, transformer.text_dim)

        def tensor2video(self, frames_CTHW):
            """Convert frames to uint8 on the device. This favours TeleFuser, because the original
            method copies float32 frames to the host.
            """
            return driver.to_host_uint8((frames_CTHW.float() + 1) / 2)

    class Functional:
        """Replacement for `torch.nn.functional` in the transformer's module. It uses the package's
        attention.
        """

        def __getattr__(self, name):
            return getattr(torch.nn.functional, name)

        @staticmethod
        def scaled_dot_product_attention(q, k, v, is_causal=False):
            out = attention_impl.attention(
                q,
                k,
                v,
                attention_config=AttentionConfig.dense_attention(AttnImplType.FLASH_ATTN_3),
                input_layout="BNSD",
                output_layout="BSND",
            )
            return out.transpose(1, 2)

    pipe = Pipeline(device=str(args.device), torch_dtype=DTYPE)
    pipe.config = pipeline.LingBotWorldFastPipelineConfig(
        control_type="cam",
        orig_height=args.height,
        orig_width=args.width,
        max_area=args.height * args.width,
        local_attn_size=args.window,
        sink_size=args.sink,
    )
    pipe._model_info = []
    pipe.text_device = pipe.vae_device = args.device
    pipe.vae, pipe.dit = vae, transformer
    if best:
        vae.enable_channels_last_3d()
        set_global_compile_configs(recompile_limit=1024)
        options = CompileConfig(enabled=True, backend="eager" if args.tiny else "inductor")
        pipe.dit = torch.compile(transformer, **options.get_compile_kwargs())
        if not args.tiny:
            current_platform.init_cudnn_optimizations()
    if flash:
        transformer_module.F = Functional()
    pipe.denoise_stage = denoising.LingBotWorldFastDenoisingStage(pipe.dit, torch_dtype=DTYPE)
    pipe.timesteps = denoising.LingBotWorldFastTimesteps()
    runtime = pipe.create_runtime(
        session.LingBotWorldFastSessionConfig(
            prompt="",
            image=driver.start_image(args),
            control_mode="cam",
            chunk_size=3,
            frame_num=(3 * args.chunks - 1) * 4 + 1,
            seed=1,
        )
    )

    def run_chunk(index):
        focal = 0.58 * args.width
        control = {
            "poses": poses(3 * index, 3),
            "intrinsics": [focal, focal, args.width / 2, args.height / 2],
        }
        override = pipe.build_control_override(runtime, control)
        return pipe.generate_next_chunk(runtime, control_override=override)

    with torch.inference_mode():
        chunks_ms = driver.time_chunks(args, run_chunk)
    replaced = [
        "weights: random",
        "text encoder: random embeddings",
        "processes and sockets: left out, the pipeline runs in this process",
        "frames: converted to uint8 on the GPU, where the package copies float32",
    ]
    if best:
        replaced.append("attention of the transformer: the package's own instead of PyTorch's SDPA")
    driver.save(
        args,
        chunks_ms,
        peer="TeleFuser 0.1.0.post3",
        settings={"window": args.window, "sink": args.sink, "steps": 4, "VAE": str(DTYPE)},
        fast_paths={
            "torch.compile": best,
            "FlashAttention 3": flash,
            "channels-last VAE": best,
            "cuDNN benchmark": torch.backends.cudnn.benchmark,
        },
        replaced=replaced,
        parameters=parameters,
    )


def poses(first, count):
    """Return the camera poses of a forward walk with a slow turn. Shape: [count, 4, 4]."""
    matrices = numpy.tile(numpy.eye(4, dtype=numpy.float32), (count, 1, 1))
    angles = 0.02 * numpy.arange(first, first + count)
    matrices[:, 0, 0] = matrices[:, 2, 2] = numpy.cos(angles)
    matrices[:, 0, 2], matrices[:, 2, 0] = numpy.sin(angles), -numpy.sin(angles)
    matrices[:, 2, 3] = 10 * angles
    return matrices


if __name__ == "__main__":
    main()
    os._exit(0)  # the package's threads would keep the process alive
