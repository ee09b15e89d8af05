# SPDX-License-Identifier: Apache-2.0
"""Runs LingBot World with vllm-omni 0.30's DiffusionEngine and the settings of its stepwise recipe.

recipe   deploy/lingbot_world_v2_stepwise.yaml as it is (eager)
best     torch.compile with static shapes, contiguous K/V and fused VAE decode kernels
"""

import asyncio
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import driver
import torch
from driver import DTYPE

ROOMY_BYTES = 100e9
"""GPU memory above which `best` stages its K/V history. The staged history takes up 24 GB, in
addition to the session's 41 GB.
"""
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "use_flow_sigmas": True,
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
    **dict.fromkeys(
        ("use_dynamic_shifting", "use_beta_sigmas", "use_exponential_sigmas", "use_karras_sigmas"),
        False,
    ),
}


def use_cpu_platform():
    """For dry runs, add a CPU platform for diffusion, which the package lacks."""
    kernels = "vllm._C_stable_libtorch"  # this module needs libcuda, and the platforms import it
    sys.modules[kernels] = types.ModuleType(kernels)
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.platforms.cuda.platform import CudaOmniPlatform
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    import vllm_omni.platforms

    def returning(value):
        return classmethod(lambda cls, *args, **options: value)

    members: dict[str, Any] = {
        "_omni_enum": OmniPlatformEnum.UNSPECIFIED,
        "device_type": "cpu",
        "dist_backend": "gloo",
    }
    results = {
        "get_torch_device": torch.device("cpu"),
        "get_free_memory": 8 << 30,
        "get_diffusion_attn_backend_cls": DiffusionAttentionBackendEnum.TORCH_SDPA.get_path(),
        "get_diffusion_worker_cls": CudaOmniPlatform.get_diffusion_worker_cls(),
        "get_diffusion_model_runner_cls": CudaOmniPlatform.get_diffusion_model_runner_cls(),
        "get_device_count": 1,
        "get_device_name": "cpu",
        "max_memory_reserved": 0,
        "max_memory_allocated": 0,
        "is_available": True,
        "supports_torch_inductor": True,
    }
    nothing = ("set_device", "synchronize", "empty_cache", "get_device_version")
    results |= dict.fromkeys((*nothing, "reset_peak_memory_stats"))
    members |= {name: returning(value) for name, value in results.items()}
    platform = type("CpuOmniPlatform", (OmniPlatform, CpuPlatform), members)
    vllm_omni.platforms._current_omni_platform = platform()

    from vllm_omni.diffusion.attention.backends import sdpa
    from vllm_omni.diffusion.layers.rope import RotaryEmbeddingWan

    native = RotaryEmbeddingWan.forward_native

    def rotate(self, x, cos, sin):
        if cos.ndim == 2:
            cos, sin = cos[None, :, None], sin[None, :, None]
        return native(self, x, cos, sin)

    RotaryEmbeddingWan.forward_native = rotate
    sdpa.SDPAImpl.forward = lambda self, *args, **options: self.forward_cuda(*args, **options)


def write_checkpoint():
    """Write a checkpoint's small files, without its weights."""
    root = Path(tempfile.mkdtemp(prefix="peers_"))
    for name, content in {
        "model_index.json": {"_class_name": "LingBotWorldCausalDMDPipeline"},
        "transformer/config.json": {"_class_name": "CausalLingBotWorldTransformer3DModel"},
        "scheduler/scheduler_config.json": SCHEDULER,
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(json.dumps(content))
    return str(root)


class Fields(dict):
    __getattr__ = dict.__getitem__


def tokenize(text, max_length=512, **_):
    tokens = torch.ones(1, max_length, dtype=torch.long)
    return Fields(input_ids=tokens, attention_mask=(torch.arange(max_length) < 40).long()[None])


class TextEncoder(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return Fields(last_hidden_state=driver.random_text(input_ids.device))


def replace_loading(args):
    """Replace the functions that the package uses to read a checkpoint."""
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
    from vllm_omni.diffusion.models.lingbot_world import pipeline as lingbot

    def load_component(loader, model, subfolder, **_):
        if subfolder == "tokenizer":
            return tokenize
        if subfolder == "text_encoder":
            return TextEncoder()
        with torch.device(args.device):  # the class defaults are those of Wan 2.1's VAE
            vae = lingbot.DistributedAutoencoderKLWan(**({"base_dim": 8} if args.tiny else {}))
        vae.to(DTYPE).init_distributed()
        driver.fill_with_random_weights(vae, args.device)
        return vae.eval()

    def load_weights(self, model, *_, **__):
        args.parameters = driver.fill_with_random_weights(model.transformer, args.device)
        return {name for name, _ in model.named_parameters()}

    lingbot.from_pretrained_with_prefetch = load_component
    lingbot.prefetch_subfolders = lambda *_, **__: None
    DiffusersPipelineLoader.load_weights = load_weights
    if args.tiny:
        sizes = {"num_layers": 2, "num_attention_heads": 2, "ffn_dim": 512}
        lingbot.CausalLingBotWorldTransformer3DModel.from_config = classmethod(
            lambda cls, config, **options: cls(**sizes, **options)
        )


def main():
    args = driver.parse_arguments("recipe", "best")
    best = args.variant == "best"
    # The window is full at chunk 6, and the image encoder becomes idle at chunk 11.
    args.chunks, args.steady_from = (3, 1) if args.tiny else (18, 13)
    if best:
        os.environ["VLLM_OMNI_AR_DIFFUSION_KV_GATHER"] = "1"
    if args.tiny:
        use_cpu_platform()
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    replace_loading(args)
    kv: dict[str, Any] = {"gpu_memory_fraction": 0.6, "warmup_cudagraph": True}
    model_config = {
        "lingbot_vae_spatial_sharding": True,
        "ar_diffusion_height": args.height,
        "ar_diffusion_width": args.width,
        "ar_diffusion_kv_config": kv,
    }
    options: dict[str, Any] = {"enforce_eager": not best}
    if best:
        options["diffusion_compile_dynamic"] = False
        model_config["lingbot_vae_decode_fast_path"] = "fused"
        kv["reuse_history_staging"] = (
            args.tiny or torch.cuda.get_device_properties(0).total_memory > ROOMY_BYTES
        )
    engine = DiffusionEngine.make_engine(
        OmniDiffusionConfig(
            model=write_checkpoint(),
            model_class_name="LingBotWorldCausalDMDPipeline",
            dtype="bfloat16",
            num_gpus=1,
            max_num_seqs=1,
            engine_backend="vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine",
            distributed_executor_backend="uni",
            step_execution=True,
            streaming_output=True,
            model_config=model_config,
            **options,
        )
    )
    generator = torch.Generator().manual_seed(0)
    request = OmniDiffusionRequest(
        prompt={
            "prompt": driver.PROMPT,
            "multi_modal_data": {
                "image": torch.rand(3, args.height, args.width, generator=generator)
            },
        },
        sampling_params=OmniDiffusionSamplingParams(
            height=args.height,
            width=args.width,
            num_frames=(args.chunks * 3 - 1) * 4 + 1,
            num_inference_steps=4,
            seed=1,
            output_type="pil",
            extra_args={
                "flow_shift": 5.0,
                "camera_action_script": [driver.CAMERA_ACTIONS] * args.chunks,
            },
        ),
        request_id="session",
    )
    chunks_ms, frames = asyncio.run(time_stream(engine, request))
    driver.save(
        args,
        chunks_ms,
        peer="vllm-omni 0.30.0",
        settings={"model_config": model_config, "executor": "uni", **options},
        fast_paths={
            "torch.compile": best,
            "contiguous K/V": best,
            "staged K/V history": kv.get("reuse_history_staging", False),
            "fused VAE decode": best,
            "FlashAttention": flash_attention(args),
        },
        replaced=[
            "weights: random",
            "text encoder: random embeddings",
            "process boundary (mp): the package's own executor uni, in this process",
        ],
        parameters=args.parameters,
        last_frames=str(frames),
    )


async def time_stream(engine, request):
    """Return the milliseconds between the chunks of one streamed request."""
    chunks_ms, start, frames = [], time.perf_counter(), None
    async for outputs in engine.step_streaming(request):
        now = time.perf_counter()
        chunks_ms.append((now - start) * 1e3)
        start = now
        images = getattr(outputs[0], "images", None) or [None]
        frames = getattr(images[0], "shape", len(images))
        print(f"chunk {len(chunks_ms) - 1}: {chunks_ms[-1]:.1f} ms, frames {frames}", flush=True)
    return chunks_ms, frames


def flash_attention(args):
    from vllm_omni.experimental.ar_diffusion.kv_cache import paged_attention

    return "off (CPU)" if args.tiny else f"version {paged_attention._resolve_fa_version(128)}"


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)  # the engine's thread would keep the process alive
    os._exit(0)
