# SPDX-License-Identifier: Apache-2.0
"""What hidden states cost: our AR worker beside vLLM's own, in pairs.

    python benchmarks/ar_hidden_states.py                 a tiny model on CPU
    python benchmarks/ar_hidden_states.py --model large   about a billion random weights, for a GPU

Two engines live at the same time and take turns on the same requests, stock first in every other pair, so that a busy
machine hits both. Reported: the median over pairs of (our time / stock time) for traffic that does not ask, and for
traffic that asks the bytes copied against the bytes asked for, and its tokens per second. Before that, rows
must have arrived and equal a plain transformers forward.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common

WORKER = "vllm_omni.worker.ARGPUWorker"
SCHEDULER = "vllm_omni.core.sched.ARHiddenStatesScheduler"
IDLE_S = 1.5
"""Pause before each timed run: a worker polls its queue for a second after a message, on a core the other needs."""
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="tiny", help="size of the random model (default: tiny)")
    parser.add_argument("--pairs", type=int, default=12, help="timed pairs (default: 12)")
    parser.add_argument("--requests", type=int, default=16, help="requests per run (default: 16)")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens (default: 64)")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens (default: 64)")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="share of the GPU for each engine (default: 0.3)")
    common.add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    import torch

    from vllm_omni.model_executor.tiny_language_model import write_tiny_language_model

    cuda = torch.cuda.is_available()
    dtype = "bfloat16" if cuda else "float32"
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_language_model(Path(folder), dtype=dtype, **SIZES[args.model])
        stock, ours = start(model, dtype, args, ours=False), start(model, dtype, args, ours=True)
        result = {
            "runner": stats(ours)["runner"],
            "async_scheduling": bool(ours.llm_engine.vllm_config.scheduler_config.async_scheduling),
            "dtype": dtype,
            "model": args.model,
            "arrived": check_rows(model, ours, dtype, args),
            "unasked": unasked(stock, ours, args),
            "asked": {mode: asked(ours, mode, args) for mode in ("all", "generated", "last")},
        }
        for llm in (stock, ours):
            llm.llm_engine.engine_core.shutdown()
    common.save("ar_hidden_states", result, args)


def start(model: Path, dtype: str, args: argparse.Namespace, *, ours: bool) -> Any:
    from vllm import LLM

    extra = {"worker_cls": WORKER, "scheduler_cls": SCHEDULER} if ours else {}
    return LLM(
        str(model),
        dtype=dtype,
        max_model_len=args.input_len + args.output_len + 16,
        max_num_seqs=args.requests,
        gpu_memory_utilization=args.gpu_memory,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **extra,
    )


def run(llm: Any, mode: str | None, args: argparse.Namespace) -> tuple[float, list[Any]]:
    """Generate for all requests; seconds and outputs. Token ids are given, so that no tokenizer is timed."""
    from vllm import SamplingParams

    from vllm_omni.hidden_states import HiddenStatesRequest

    extra = HiddenStatesRequest(hidden_states=mode).to_extra_args() if mode else None  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, extra_args=extra)
    prompts = [
        {"prompt_token_ids": [3 + (7 * i + j) % 250 for j in range(args.input_len)]} for i in range(args.requests)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started, outputs


def stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("hidden_states_stats")[0]


def check_rows(model: Path, llm: Any, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Rows of every request against a plain fp32 forward; ends the benchmark if they are missing or wrong.

    bf16 rounds after every operation and the error grows with depth, so transformers' own bf16 rows tell what rounding
    does to this model: ours may be 1.5 times as far from the fp32 rows. fp32 rows agree to 1e-4.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_omni.hidden_states import hidden_states_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()

    def difference(rows_ND: torch.Tensor, expected_ND: torch.Tensor) -> float:
        return float((rows_ND.float().to(device) - expected_ND).norm() / expected_ND.norm())

    worst, rounding, rows = 0.0, 0.0, 0
    for output in run(llm, "all", args)[1]:
        states = hidden_states_of(output)
        if states is None:
            raise SystemExit("no hidden states arrived")
        token_ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]], device=device)
        with torch.no_grad():
            expected = exact.model(token_ids).last_hidden_state[0]
            rounding = max(rounding, difference(rounded.model(token_ids).last_hidden_state[0], expected))
        worst = max(worst, difference(states[-1], expected))
        rows += states.num_rows
    allowed = 1e-4 if dtype == "float32" else 1.5 * rounding
    if worst > allowed or rows != args.requests * (args.input_len + args.output_len - 1):
        raise SystemExit(f"hidden states differ from transformers': {rows} rows, relative error {worst:.2e}")
    print(f"{rows} rows arrived; largest relative error against fp32 transformers {worst:.2e} (allowed {allowed:.2e})")
    return {"rows": rows, "relative_error": worst, "relative_error_of_transformers": rounding, "allowed": allowed}


def unasked(stock: Any, ours: Any, args: argparse.Namespace) -> dict[str, Any]:
    for llm in (stock, ours):
        run(llm, None, args)
    copied = stats(ours)["bytes_copied"]
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    tokens: dict[str, list[Any]] = {}
    for pair in range(args.pairs):
        order = [("stock", stock), ("ours", ours)]
        for name, llm in order if pair % 2 == 0 else reversed(order):
            time.sleep(IDLE_S)
            elapsed, outputs = run(llm, None, args)
            seconds[name].append(elapsed)
            tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
    ratios = [b / a for a, b in zip(seconds["stock"], seconds["ours"], strict=True)]
    generated = args.requests * args.output_len
    return {
        "pairs": args.pairs,
        "median_time_ratio_ours_to_stock": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "stock_tokens_per_s": round(generated / statistics.median(seconds["stock"]), 1),
        "ours_tokens_per_s": round(generated / statistics.median(seconds["ours"]), 1),
        "same_tokens": tokens["stock"] == tokens["ours"],
        "bytes_copied": stats(ours)["bytes_copied"] - copied,
    }


def asked(ours: Any, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes copied from the model's output against the bytes of the rows that were asked for."""
    from vllm_omni.hidden_states import hidden_states_of

    before = stats(ours)["bytes_copied"]
    elapsed, outputs = run(ours, mode, args)
    received = [hidden_states_of(output) for output in outputs]
    # `last` is one row per step on its way out of the model, since no step knows that it is the last.
    per_request = {
        "all": args.input_len + args.output_len - 1,
        "generated": args.output_len - 1,
        "last": args.output_len,
    }
    row_bytes = received[0].nbytes // received[0].num_rows
    return {
        "bytes_copied": stats(ours)["bytes_copied"] - before,
        "bytes_asked": per_request[mode] * args.requests * row_bytes,
        "bytes_received": sum(states.nbytes for states in received),
        "tokens_per_s": round(args.requests * args.output_len / elapsed, 1),
    }


if __name__ == "__main__":
    main()
