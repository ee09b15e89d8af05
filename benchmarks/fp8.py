# SPDX-License-Identifier: Apache-2.0
"""Measure the time and error of matrix products with FP8 weights.

Each kind of matrix product is measured separately. The benchmark also measures the error in
LingBot's latents when only one kind of layer uses FP8.

    # a LingBot chunk's products in bf16 and in every FP8 method
    python benchmarks/fp8.py products
    # engines with one kind of layer in FP8, others in bf16
    python benchmarks/fp8.py latents --layers 8
    # stored formats: products of the tiny fixtures' layers
    python benchmarks/fp8.py stored
    # the same at a small size on a CPU, with the methods that have CPU kernels
    python benchmarks/fp8.py products --tiny
    python benchmarks/fp8.py latents --tiny --height 32 --width 48

Errors are relative, |found - bf16| / |bf16|. All weights are random: `products` draws them from a
normal distribution. `latents` uses vLLM's dummy weights at full size or, with `--tiny`, the tiny
checkpoint's weights. benchmarks/lingbot_world.py measures chunk times.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, run_request, running_engine, save

METHODS = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
KINDS = (
    "self_attn.qkv",
    "self_attn.o",
    "cross_attn.q",
    "cross_attn.kv",
    "cross_attn.o",
    "ffn.0",
    "ffn.2",
)
FIXTURES = Path(__file__).parents[1] / "tests" / "golden" / "quantized"
CHUNK_TOKENS = 4680
TEXT_TOKENS = 512


def products(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time and error of each kind of matrix product in this process."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    import vllm_omni.worker

    assert vllm_omni.worker.DiffusionGPUWorker  # prepares torch for a CPU if there is no GPU
    from vllm_omni.model_executor.models.registry import get_family

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(
                1, 0, f"file://{folder}/port", 0, "nccl" if device.type == "cuda" else "gloo"
            )
            initialize_model_parallel()
        get_family("lingbot_world").make_tiny(Path(folder) / "world", 0, "original")
        for method in (None, *METHODS):
            engine = EngineArgs(
                model=f"{folder}/world",
                config_format="omni",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                quantization=method,
                additional_config={"omni": {"height": 32, "width": 48}},
            )
            try:
                config = engine.create_engine_config()
                with set_current_vllm_config(config), torch.inference_mode():
                    rows[method or "bf16"] = {
                        kind: product(kind, config, device, args) for kind in KINDS
                    }
            except (ValueError, RuntimeError) as error:
                rows[method or "bf16"] = {"error": " ".join(str(error).split())[:300]}
    for method in METHODS:
        for kind, row in rows[method].items():
            if isinstance(row, dict):
                exact = rows["bf16"][kind]["result"]
                row["relative_error"] = round(
                    float((row["result"] - exact).norm() / exact.norm()), 5
                )
    for row in (row for kinds in rows.values() for row in kinds.values() if isinstance(row, dict)):
        del row["result"]
    return rows


def product(kind: str, config: Any, device: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one kind of layer at full width. The name of the layer determines the random weights
    and inputs.
    """
    import torch
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    from vllm_omni.model_executor.layers.collectives.parallel import (
        ParallelContext,
        checkpoint_slots,
    )
    from vllm_omni.model_executor.layers.linear.linear import (
        ColumnLinear,
        LinearPrecision,
        MergedLinear,
        RowLinear,
    )

    dim, inner = (256, 768) if args.tiny else (5120, 13824)
    tokens = (TEXT_TOKENS if kind == "cross_attn.kv" else CHUNK_TOKENS) // (36 if args.tiny else 1)
    position, precision = (
        (ParallelContext(), LinearPrecision(config.quant_config)),
        f"transformer.blocks.0.{kind}",
    )
    makers: dict[str, Callable[[], Any]] = {
        "qkv": lambda: MergedLinear(dim, ("q", "k", "v"), (dim, dim, dim), *position, precision),
        "kv": lambda: MergedLinear(dim, ("k", "v"), (dim, dim), *position, precision),
        "0": lambda: ColumnLinear(dim, inner, *position, precision),
        "2": lambda: RowLinear(inner, dim, *position, precision),
        "q": lambda: ColumnLinear(dim, dim, *position, precision),
        "o": lambda: RowLinear(dim, dim, *position, precision),
    }
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            holder = torch.nn.ModuleDict({"layer": makers[kind.rpartition(".")[2]]()})
            layer = holder["layer"]
            generator = torch.Generator().manual_seed(len(kind))
            for slot in checkpoint_slots(holder).values():
                scale = slot.shape[-1] ** -0.5 if len(slot.shape) == 2 else 0.1
                slot.load(
                    (scale * torch.randn(slot.shape, generator=generator, device="cpu")).to(device)
                )
            if layer.quant_method.uses_meta_device:
                finalize_layerwise_processing(holder, config.model_config)
            elif config.quant_config is not None:
                layer.quant_method.process_weights_after_loading(layer)
            x = torch.randn(tokens, layer.input_size, generator=generator, device="cpu").to(
                device, torch.bfloat16
            )
            result = layer(x).float().cpu()
            return {"ms": round(timed(lambda: layer(x), device), 4), "result": result}
    finally:
        torch.set_default_dtype(torch.float32)


def stored(args: argparse.Namespace) -> dict[str, Any]:
    """For each quantized fixture, measure the largest error of any layer that runs in the stored
    format, relative to the same layer with dequantized weights.

    The fixtures' layers are only 32 and 64 channels wide. If a kernel requires wider layers, the
    fixture's result is an error message, which says nothing about layers of real sizes.
    """
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    import vllm_omni.worker

    assert vllm_omni.worker.DiffusionGPUWorker
    from vllm_omni.model_executor.models.registry import get_family

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(
                1, 0, f"file://{folder}/port", 0, "nccl" if device.type == "cuda" else "gloo"
            )
            initialize_model_parallel()
        get_family("null_world").make_tiny(Path(folder) / "world", 0, "original")
        engine = EngineArgs(
            model=f"{folder}/world",
            config_format="omni",
            skip_tokenizer_init=True,
            dtype="bfloat16",
        )
        config = engine.create_engine_config()
        for fixture in sorted(path for path in FIXTURES.iterdir() if path.is_dir()):
            try:
                with set_current_vllm_config(config), torch.inference_mode():
                    rows[fixture.name] = stored_error(fixture, device)
            except Exception as error:  # recorded as the result of this format
                rows[fixture.name] = {"error": " ".join(str(error).split())[:300]}
    return rows


def stored_error(fixture: Path, device: Any) -> dict[str, Any]:
    """Run each layer of a fixture's transformer with vLLM's quantization method and with
    dequantized weights, and return the largest error.
    """
    import torch
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization import get_quantization_config

    from vllm_omni.model_executor.checkpoint.quantization import LAYERS_KEY, quantization_of
    from vllm_omni.model_executor.checkpoint.tensor_files import read_json
    from vllm_omni.model_executor.layers.linear.stored_quantization import StoredQuantization
    from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES
    from vllm_omni.model_executor.models.wan2_2.config import Wan22Config
    from vllm_omni.model_executor.models.wan2_2.transformer import Wan22Transformer
    from vllm_omni.model_executor.models.wan2_2.weights import load_transformer

    values = quantization_of({"transformer": fixture}, TRANSFORMER_RULES).get("quantization_config")
    if values is None:
        return {"read_back": True}
    method = "modelopt_fp4" if "NVFP4" in values.get("quant_algo", "") else values["quant_method"]
    stored_as = StoredQuantization(
        get_quantization_config(method).from_config(values), values[LAYERS_KEY]
    )
    config = Wan22Config.from_checkpoint(read_json(fixture / "config.json"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        networks = []
        for quantization in (stored_as, None):
            with device:
                network = Wan22Transformer(config, quantization=quantization)
            load_transformer(network, fixture, config)
            networks.append(
                {name: m for name, m in network.named_modules() if isinstance(m, LinearBase)}
            )
        worst = 0.0
        for name, layer in networks[0].items():
            layer.quant_method.process_weights_after_loading(layer)
            x = torch.randn(64, layer.input_size, device=device)
            found, expected = layer(x).float(), networks[1][name](x).float()
            worst = max(worst, float((found - expected).norm() / expected.norm()))
        return {"largest_relative_error": round(worst, 5), "layers": len(networks[0])}
    finally:
        torch.set_default_dtype(torch.float32)


def timed(call: Callable[[], Any], device: Any, repeats: int = 20) -> float:
    """Return the median time of one call in milliseconds."""
    import torch

    values = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        values.append(1e3 * (time.perf_counter() - started))
    return statistics.median(values[3:])


async def latents(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the errors in the latents of a session's first chunks, with a separate engine for
    each row of the result.
    """
    from lingbot_world import write_checkpoint

    from vllm_omni.model_executor.models.registry import get_family

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "world"
        if args.tiny:
            get_family("lingbot_world").make_tiny(model, 0, "original")
        else:
            write_checkpoint(model, args.layers)
        exact = await session(model, args, {})
        rows: dict[str, Any] = {}
        settings: dict[str, dict[str, Any]] = {
            "all": {},
            "K/V": {"quantization": None, "kv_cache_dtype": "fp8"},
        }
        for kind in KINDS:
            others = [f"*.{other}" for other in KINDS if other != kind]
            settings[kind] = {"quantization_config": {"ignore": others}}
        for name in args.only or settings:
            try:
                found = await session(
                    model, args, {"quantization": args.quantization, **settings[name]}
                )
            except Exception as error:  # recorded as the result of this row
                rows[name] = {"error": " ".join(str(error).split())[:300]}
                continue
            pairs = zip(found, exact, strict=True)
            rows[name] = [round(float((a - b).norm() / b.norm()), 5) for a, b in pairs]
            print(name, rows[name], flush=True)
    return rows


async def session(model: Path, args: argparse.Namespace, precision: dict[str, Any]) -> list[Any]:
    """Return the latents of the first chunks of one session."""
    import torch

    from vllm_omni.inputs import DiffusionParams

    image = torch.randint(
        0,
        256,
        (args.height, args.width, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    chunks = []
    async with running_engine(
        model,
        {"height": args.height, "width": args.width, "model": {"text_encoder_device": "cpu"}},
        enforce_eager=args.eager,
        load_format="auto" if args.tiny else "dummy",
        dtype="bfloat16",
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision,
    ) as engine:
        for index in range(args.chunks):
            first = {"prompt": "a coast road in the evening", "seed": 1} if index == 0 else {}
            params = DiffusionParams(
                session_id="a",
                chunk_index=index,
                height=args.height,
                width=args.width,
                actions=[["w"], ["w", "j"], ["w"]],
                output="latents",
                **first,
            )
            _, tensors = await run_request(
                engine, params, {"image": image} if index == 0 else None, f"a-{index}"
            )
            chunks.append(tensors["latents"].float().clone())
    return chunks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("products", "latents", "stored"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=("all", "K/V", *KINDS),
        help="rows of `latents` (default: each)",
    )
    parser.add_argument("--quantization", default="fp8_per_channel", help="vLLM's flag")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    add_output_arguments(parser)
    args = parser.parse_args()
    in_process = {"products": products, "stored": stored}
    rows = in_process[args.what](args) if args.what in in_process else asyncio.run(latents(args))
    save(f"fp8_{args.what}", {"method": args.quantization, "tiny": args.tiny, "rows": rows}, args)


if __name__ == "__main__":
    main()
