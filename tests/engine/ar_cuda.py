# SPDX-License-Identifier: Apache-2.0
"""An AsyncLLM on CUDA with vLLM's V1 or V2 model runner, and tolerances for bf16 hidden states.

bf16 rounds after every operation, and the error grows with depth: for this tiny model, the bf16
hidden states of Hugging Face Transformers differ by up to 13 % from its fp32 hidden states. The
reference is therefore the fp32 forward pass. The error of the engine's bf16 hidden states may be at
most 1.5 times the error of Transformers in bf16. If hidden states belonged to a wrong token, the
error would be many times larger.

The hidden states of an fp32 engine are compared directly. Attention in fp32 on CUDA uses vLLM's
Triton kernel, which by default multiplies in TF32 (10 bits of mantissa). This changes the last
hidden states by 0.2 to 0.4 % (emulated in Transformers on a CPU; 0.3 to 0.5 % on an H200) and can
change the sampled token when two tokens have almost equal logits. `Engine` therefore makes Triton
use IEEE fp32 products.
"""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_engine import SCHEDULER, WORKER, params
from helpers.waits import pause_task
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_omni.hidden_states import hidden_states_of

SHARED_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
"""Engine arguments that skip the memory measurement at startup, so that the engines of several
tests can share a GPU.
"""
FP32_ERROR = 1e-3
"""Relative tolerance for fp32 hidden states, required because the engine and the reference sum in
different orders.

The error with TF32 is 2 to 5 times this value, and the error for a wrong token is 1000 times this
value.
"""
IEEE_PRODUCTS = {"TRITON_F32_DEFAULT": "ieee"}
"""Environment variable for the worker that makes Triton multiply fp32 values in full fp32
precision.
"""
LIMIT_S = 300
"""Timeout in seconds for a test whose engine compiles its model."""
ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_TWO_GPUS = [
    pytest.mark.cuda,
    pytest.mark.nightly,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FINAL = RequestOutputKind.FINAL_ONLY
WIDTH = 256
"""Hidden size of the model that `write_model` writes."""
PROMPTS = [
    "the red bird sings in the big tree",
    "a small blue house",
    "sea",
    "the road is grey " * 12,
]


def write_model(out: Path, **config: Any) -> Path:
    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    return write_tiny_language_model(
        out,
        dtype="bfloat16",
        hidden_size=WIDTH,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        **config,
    )


class Engine:
    """An AsyncLLM with async scheduling, chunked prefill and prefix caching. `runner` selects
    vLLM's V1 or V2 model runner.
    """

    def __init__(
        self, model: Path, runner: str, omni: dict[str, Any] | None = None, **engine_args: Any
    ) -> None:
        self._environment = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
        if engine_args.get("dtype") == "float32":
            self._environment |= IEEE_PRODUCTS
        os.environ.update(self._environment)
        self.runner = runner
        self.loop = asyncio.new_event_loop()
        self.numbers = iter(range(10**6))
        self.engine = self.loop.run_until_complete(self._start(model, omni or {}, engine_args))

    async def _start(self, model: Path, omni: dict[str, Any], engine_args: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        fields: dict[str, Any] = {
            "worker_cls": WORKER,
            "scheduler_cls": SCHEDULER,
            "max_model_len": 1024,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            **SHARED_GPU,
            "additional_config": {"omni": {"hidden_state_layers": [0, 2], **omni}},
        }
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(model), **{**fields, **engine_args})
        )

    def run(
        self, *requests: tuple[str, SamplingParams] | tuple[str, SamplingParams, Any]
    ) -> list[list[Any]]:
        """Run all requests concurrently; return all outputs of each request. A request consists of
        a prompt, sampling parameters and optionally a LoRA adapter.
        """

        async def stream(prompt: str, sampling: SamplingParams, adapter: Any = None) -> list[Any]:
            name = f"r{next(self.numbers)}"
            return [
                out
                async for out in self.engine.generate(prompt, sampling, name, lora_request=adapter)
            ]

        async def together() -> Any:
            return await asyncio.gather(*(stream(*request) for request in requests))

        return self.loop.run_until_complete(together())

    def stats(self) -> dict[str, Any]:
        return self.loop.run_until_complete(self.engine.collective_rpc("hidden_states_stats"))[0]

    def stop(self) -> None:
        self.engine.shutdown()
        self.loop.run_until_complete(pause_task(0.1))  # lets the engine's tasks end
        for name in self._environment:
            os.environ.pop(name, None)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Reference:
    """Hidden states that Hugging Face Transformers computes for the same tokens, in fp32 and in
    bf16.

    Args:
        change: Function applied to both models.
        dtype: Dtype of the engine that is compared with this reference.
    """

    def __init__(
        self,
        model: Path,
        change: Callable[[Any], None] = lambda model: None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self.exact, self.rounded = (
            AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda().eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        for loaded in (self.exact, self.rounded):
            change(loaded)

    def states(self, model: Any, token_ids: list[int], layer: int) -> torch.Tensor:
        with torch.no_grad():
            output = model(torch.tensor([token_ids]).cuda(), output_hidden_states=True)
        return output.hidden_states[layer][0].float().cpu()

    def check(
        self, output: Any, mode: str = "all", layers: tuple[int, ...] = (-1,), index: int = 0
    ) -> None:
        """Check that completion `index` contains all hidden states of the right tokens, within the
        tolerance.
        """
        token_ids = [*output.prompt_token_ids, *output.outputs[index].token_ids]
        num_prompt = len(output.prompt_token_ids)
        states = hidden_states_of(output, index)
        assert states is not None, "no hidden states arrived"
        first = {"all": 0, "generated": num_prompt, "last": len(token_ids) - 2}[mode]
        assert states.positions.tolist() == list(range(first, len(token_ids) - 1))
        assert states.token_ids.tolist() == token_ids[first:-1]
        assert tuple(states) == layers
        for layer in layers:
            assert states[layer].dtype == self.dtype
            want = self.states(self.exact, token_ids[:-1], layer)
            rounded = self.states(self.rounded, token_ids[:-1], layer)
            rounding = max(distance(rounded, want), distance(rounded[first:], want[first:]))
            error = distance(states[layer].float(), want[first:])
            allowed = FP32_ERROR if self.dtype == torch.float32 else max(1.5 * rounding, 1e-6)
            assert error <= allowed, (
                f"layer {layer}: relative error {error:.4f}, allowed {allowed:.4f}"
            )


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance between two tensors, relative to the norm of `expected`."""
    return float((found - expected).norm() / expected.norm())


def check_all_modes(
    engine: Engine, reference: Reference, layers: tuple[int, ...] = (0, 2, -1)
) -> None:
    """Check a batch of requests with and without hidden states, whose prompts are prefilled in
    chunks.
    """
    modes = ["all", None, "generated", "last"]
    requests = [
        (PROMPTS[3], params(mode, layers, max_tokens=12, output_kind=FINAL)) for mode in modes
    ]
    for mode, [output] in zip(modes, engine.run(*requests), strict=True):
        if mode is None:
            assert hidden_states_of(output) is None
        else:
            reference.check(output, mode, layers)


def check_ngram_drafts(model: Path, reference: Reference, runner: str) -> None:
    """With ngram drafts computed on the GPU, check that only accepted tokens have hidden states and
    that these hidden states match those of Hugging Face Transformers.
    """
    speculative = {
        "method": "ngram_gpu",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with Engine(model, runner, speculative_config=speculative) as running:
        for mode in ("all", "generated", "last"):
            requested = params(mode, max_tokens=40, output_kind=FINAL)
            [[output]] = running.run((PROMPTS[3], requested))
            reference.check(output, mode)


def write_adapter(model: Path, folder: Path, rank: int = 8) -> Callable[[Any], None]:
    """Save a random LoRA adapter for q_proj and v_proj; return a function that adds the adapter to
    a model.
    """
    config = json.loads((model / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    sizes = {"q_proj": config["hidden_size"], "v_proj": head * config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for block in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            key = f"base_model.model.model.layers.{block}.self_attn.{name}"
            down = torch.randn(rank, config["hidden_size"], generator=generator) * 0.3
            tensors[f"{key}.lora_A.weight"] = down.bfloat16()
            tensors[f"{key}.lora_B.weight"] = (
                torch.randn(size, rank, generator=generator) * 0.3
            ).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))

    def add(loaded: Any) -> None:
        for key, up in tensors.items():
            if key.endswith("lora_B.weight"):
                down = tensors[key.replace("lora_B", "lora_A")]
                block, name = key.split(".")[4], key.split(".")[6]
                weight = getattr(loaded.model.layers[int(block)].self_attn, name).weight
                weight.data += (up.float() @ down.float()).to(weight)

    return add
