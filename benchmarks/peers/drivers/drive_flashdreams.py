# SPDX-License-Identifier: Apache-2.0
"""Runs LingBot World with NVIDIA FlashDreams' pipeline (commit d5c4ce0).

recipe   its configuration with torch.compile (mode "default", because its autotuning takes
         more than five minutes) and CUDA graphs
"""

import os
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec

import driver
import torch
from driver import DTYPE

os.environ.setdefault("FLASHDREAMS_CACHE_DIR", tempfile.gettempdir() + "/flashdreams_cache")


def provide_modules():
    """Provide empty modules for packages that FlashDreams imports but this benchmark does not
    use.
    """
    replaced = []
    for name, members in {
        "boto3": {"client": None},
        "botocore": {"exceptions": None},
        "botocore.exceptions": {"ClientError": OSError},
        "pynvml": {"NVMLError": OSError},
    }.items():
        try:
            __import__(name)
        except ImportError:
            module = types.ModuleType(name)
            module.__path__, module.__spec__ = [], ModuleSpec(name, None)
            vars(module).update(members)
            sys.modules[name] = module
            replaced.append(f"{name}: empty, imported only")
    return replaced


def use_native_kernels():
    """Replace cuDNN attention and the Triton RoPE for dry runs on the CPU."""
    from flashdreams.core.attention import cp, rope

    def attend(query, key, value, return_lse=False):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value), None

    def rotate(x, freqs, interleaved=False, inplace=True, **_):
        angles = freqs[..., : freqs.shape[-1] // 2].float().transpose(0, 1)
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        pairs = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
        rotated = torch.stack(pairs, -1).flatten(-2).to(x.dtype)
        return x.copy_(rotated) if inplace else rotated

    cp.torch_sdpa_cudnn = attend
    rope.apply_rotary_pos_emb = rotate


class TorchWithPlainMin:
    """Replacement for `torch` in the K/V cache module. It avoids `torch.sym_min`, which causes a
    graph break in PyTorch 2.11.
    """

    sym_min, sym_max = staticmethod(min), staticmethod(max)

    def __getattr__(self, name):
        return getattr(torch, name)


class RandomText(torch.nn.Module):
    def forward(self, texts: list[str]):
        return driver.random_text(torch.device("cpu" if "--tiny" in sys.argv else "cuda:0"))


def main():
    args = driver.parse_arguments("recipe")
    replaced = [
        "weights: random",
        "text encoder: random embeddings",
        "WebRTC server and processes: left out, the pipeline runs in this process",
        "torch.sym_min of the K/V cache: Python's min, so that the network is one graph",
        "autotuning: off, because it takes more than five minutes",
        "chunks before the window is full: not compiled, so that one graph is compiled",
        *provide_modules(),
    ]
    from flashdreams.core.attention import kvcache
    from flashdreams.infra import compile as compilation
    from flashdreams.infra.config import derive_config
    from flashdreams.infra.video_output import video_tensor_to_hwc_uint8
    from flashdreams.recipes.wan.autoencoder import vae
    from lingbot.config import PIPELINE_LINGBOT_WORLD_V2_14B_CAUSAL_FAST as RECIPE
    from lingbot.encoder.camctrl import CamCtrlInput

    kvcache.torch = TorchWithPlainMin()
    compilation.compile_module.__kwdefaults__["mode"] = "default"
    vae.load_checkpoint = lambda *_, **__: {}
    vae.WanVAE.load_state_dict = lambda self, *_, **__: driver.fill_with_random_weights(
        self, args.device, DTYPE
    )
    fast = not args.tiny
    if args.tiny:
        use_native_kernels()
    tiny = {"base_dim": 8} if args.tiny else {}
    network = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2} if args.tiny else {}
    config = derive_config(
        RECIPE,
        enable_sync_and_profile=False,
        text_encoder=None,
        diffusion_model={
            "transformer": {
                "network": network,
                "checkpoint_path": None,
                "init_device": str(args.device),
                "window_size_t": args.window - args.sink,  # this size excludes the sink frames
                "sink_size_t": args.sink,
                "compile_network": fast,
                "use_cuda_graph": fast,
            }
        },
        decoder={"use_cuda_graph": fast, **tiny},
        encoder={"i2v": {"encoder": {"use_cuda_graph": fast, **tiny}}},
    )
    pipeline = config.setup().to(device=args.device).eval()
    parameters = driver.fill_with_random_weights(pipeline.diffusion_model, args.device)
    pipeline.requires_grad_(False)
    pipeline.text_encoder = RandomText()

    transformer = pipeline.diffusion_model.transformer
    full_window = transformer._cuda_graph_capture_ar_idx
    graph = transformer._cuda_graph_dispatch.cond_call if fast else None
    compiled = graph.fn if fast else None
    if fast:
        graph.fn = transformer.network._orig_mod
    ratio = pipeline.decoder.spatial_compression_ratio
    with torch.no_grad():
        cache = pipeline.initialize_cache(
            text=[driver.PROMPT],
            height=args.height // ratio,
            width=args.width // ratio,
            release_oneshot_encoders=False,
            image=(torch.rand(1, 3, args.height, args.width, device=args.device) * 2 - 1).to(DTYPE),
        )
    focal = 0.6 * args.width
    intrinsics = torch.tensor([focal, focal, args.width / 2, args.height / 2], device=args.device)
    first_frame = 0

    def run_chunk(index):
        nonlocal first_frame
        if fast and index == full_window:
            graph.fn, graph.warmup_iters, graph._warmup_remaining = compiled, 2, 2
        count = pipeline.get_num_input_frames(index)
        angles = torch.arange(first_frame, first_frame + count, device=args.device) * 0.01
        first_frame += count
        poses = torch.eye(4, device=args.device).repeat(count, 1, 1)
        poses[:, 0, 0] = poses[:, 2, 2] = angles.cos()
        poses[:, 0, 2], poses[:, 2, 0] = angles.sin(), -angles.sin()
        poses[:, 2, 3] = 2 * angles
        camera = CamCtrlInput(intrinsics=intrinsics.repeat(count, 1), poses=poses, world_scale=1.0)
        video = pipeline.generate(autoregressive_index=index, cache=cache, input=camera)
        frames = video_tensor_to_hwc_uint8(video, layout="tchw").cpu().numpy()
        pipeline.finalize(autoregressive_index=index, cache=cache)  # runs the clean-context pass
        return frames

    chunks_ms = driver.time_chunks(args, run_chunk)
    driver.save(
        args,
        chunks_ms,
        peer="FlashDreams d5c4ce0",
        settings={"window": args.window, "sink": args.sink, "steps": 4, "VAE": str(DTYPE)},
        fast_paths={
            "torch.compile": fast,
            "CUDA graph of the network": bool(graph is not None and graph._graph is not None),
            "graph breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
            "attention": "cuDNN" if fast else "PyTorch",
        },
        replaced=replaced,
        parameters=parameters,
    )


if __name__ == "__main__":
    main()
    os._exit(0)  # the package's threads would keep the process alive
