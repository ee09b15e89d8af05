# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of hidden states by comparing this package's AR worker with vLLM's.

    python benchmarks/ar_hidden_states.py                 a tiny model on CPU
    python benchmarks/ar_hidden_states.py --model large   about a billion random weights, for a GPU

    # the figure to quote from a CPU: about 8 minutes
    python benchmarks/ar_hidden_states.py --starts 4 --pairs 300
    # stock vLLM against stock vLLM: the error of the method itself
    python benchmarks/ar_hidden_states.py --control

Two engines run at the same time. Each engine is one process that contains the front end, scheduler,
worker and model. The CPU time of this process is therefore the entire cost of its requests, and
none of it is spent busy-waiting for other processes. The engines take turns running the same
requests in short slices, so other load on the machine affects both engines. The order is stock,
ours, ours, stock, and is reversed in every other round. On a CPU, both engines run one thread on
the same core, use the same hash seed, and collect garbage right before each slice. One round of
four slices is called a pair. A pair's ratio is the time of this package's two slices divided by the
time of the two stock slices.

For requests without hidden states, the benchmark reports the ratios of CPU time and of elapsed
time, each with a 95 % confidence interval. The memory layout of a process can favour one engine for
as long as the process lives, and measuring more pairs does not reveal this bias. The engines are
therefore started `--starts` times: the ratio is the geometric mean of the medians of all starts,
and the bootstrap interval resamples first the starts and then the pairs within each start. Quote
CPU time if the machine also runs other programs, and elapsed time for a GPU. The benchmark also
reports how many Python and C calls each engine makes in one slice. This number does not depend on
other load. For requests with hidden states, the benchmark reports the bytes copied, the bytes
requested, and tokens per second. Before measuring, the benchmark checks that hidden states arrive
and match those of a plain forward pass in Hugging Face Transformers.
"""

import argparse
import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common

WORKER = "vllm_omni.worker.ARGPUWorker"
SCHEDULER = "vllm_omni.core.sched.ARHiddenStatesScheduler"
RESAMPLES = 4_000
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=SIZES, default="tiny", help="size of the random model (default: tiny)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=150,
        help="timed rounds of four slices per start (default: 150)",
    )
    parser.add_argument(
        "--starts", type=int, default=1, help="how often both engines are started (default: 1)"
    )
    parser.add_argument("--control", action="store_true", help="compare stock vLLM with itself")
    parser.add_argument("--requests", type=int, default=16, help="requests per run (default: 16)")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens (default: 64)")
    parser.add_argument("--output-len", type=int, default=32, help="generated tokens (default: 32)")
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=0.3,
        help="share of the GPU for each engine (default: 0.3)",
    )
    common.add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # The whole engine must run in the process that is measured.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["PYTHONHASHSEED"] = "0"

    import torch

    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    cuda = torch.cuda.is_available()
    dtype = "bfloat16" if cuda else "float32"
    args.core = None if cuda else max(os.sched_getaffinity(0))
    if args.core is not None:
        os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND=str(args.core))
    result: dict[str, Any] = {"dtype": dtype, "model": args.model, "control": args.control}
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_language_model(Path(folder), dtype=dtype, **SIZES[args.model])
        for number in range(args.starts):
            with (
                engine(model, dtype, args, ours=False) as stock,
                engine(model, dtype, args, ours=not args.control) as ours,
            ):
                if number == 0 and not args.control:
                    result |= ours.call(describe)
                    result["arrived"] = ours.call(check_rows, model, dtype)
                starts.append(unasked(stock, ours, args))
                if number == args.starts - 1 and not args.control:
                    result["asked"] = {
                        mode: ours.call(requested, mode) for mode in ("all", "generated", "last")
                    }
    result["unasked"] = summary(starts, args)
    common.save("ar_hidden_states" + ("_control" if args.control else ""), result, args)
    for clock in ("processor_time", "elapsed_time"):
        found = result["unasked"][clock]
        print(
            f"{clock}: ours / stock {found['median_ratio_ours_to_stock']} {found['confidence_95']}"
        )


class Engine:
    """Handle for an engine that runs in a separate process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, work: Any, *arguments: Any) -> Any:
        """Run `work(llm, args, *arguments)` in the engine's process and return the result. Raise
        RuntimeError if the call fails.
        """
        self._connection.send((work, arguments))
        response, reason = self._connection.recv()
        if reason:
            raise RuntimeError(reason)
        return response


@contextlib.contextmanager
def engine(model: Path, dtype: str, args: argparse.Namespace, *, ours: bool) -> Iterator[Engine]:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, model, dtype, args, ours)
    )
    child.start()
    there.close()
    try:
        yield Engine(here)
    finally:
        here.close()
        child.join(60)
        child.terminate()


def serve(
    connection: Connection, model: Path, dtype: str, args: argparse.Namespace, ours: bool
) -> None:
    """Run in the child process: start an engine, and execute calls until the parent closes the
    connection.
    """
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    from vllm import LLM

    extra = {"worker_cls": WORKER, "scheduler_cls": SCHEDULER} if ours else {}
    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=args.input_len + args.output_len + 16,
        max_num_seqs=args.requests,
        gpu_memory_utilization=args.gpu_memory,
        enable_prefix_caching=False,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        **extra,
    )
    with contextlib.suppress(EOFError):
        while True:
            work, arguments = connection.recv()
            try:
                connection.send((work(llm, args, *arguments), None))
            except (Exception, SystemExit) as error:
                connection.send((None, f"{type(error).__name__}: {error}"))


def describe(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "runner": stats(llm)["runner"],
        "async_scheduling": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
    }


def run(llm: Any, mode: str | None, args: argparse.Namespace) -> tuple[float, list[Any]]:
    """Generate tokens for all requests, and return the elapsed seconds and the outputs.

    Requests contain token ids, so tokenization is not timed.
    """
    from vllm import SamplingParams

    from vllm_omni.hidden_states import HiddenStatesRequest

    extra = HiddenStatesRequest(hidden_states=mode).to_extra_args() if mode else None  # type: ignore[arg-type]
    sampling = SamplingParams(
        temperature=0, max_tokens=args.output_len, ignore_eos=True, extra_args=extra
    )
    prompts = [
        {"prompt_token_ids": [3 + (7 * i + j) % 250 for j in range(args.input_len)]}
        for i in range(args.requests)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started, outputs


def stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("hidden_states_stats")[0]


def check_rows(llm: Any, args: argparse.Namespace, model: Path, dtype: str) -> dict[str, Any]:
    """Compare the hidden states of every request with those of a plain fp32 forward pass, and abort
    the benchmark if they are missing or wrong.

    bf16 rounds after every operation, and the error grows with depth. The error of Hugging Face
    Transformers' bf16 hidden states therefore serves as this model's rounding error. This package's
    hidden states may differ from the fp32 ones by at most 1.5 times that error. In fp32, the
    tolerance is 1e-4.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_omni.hidden_states import hidden_states_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    rounded = (
        AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
    )

    def difference(rows_ND: torch.Tensor, expected_ND: torch.Tensor) -> float:
        return float((rows_ND.float().to(device) - expected_ND).norm() / expected_ND.norm())

    worst, rounding, rows = 0.0, 0.0, 0
    for output in run(llm, "all", args)[1]:
        states = hidden_states_of(output)
        if states is None:
            raise SystemExit("no hidden states arrived")
        token_ids = torch.tensor(
            [[*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]], device=device
        )
        with torch.no_grad():
            expected = exact.model(token_ids).last_hidden_state[0]
            rounding = max(
                rounding, difference(rounded.model(token_ids).last_hidden_state[0], expected)
            )
        worst = max(worst, difference(states[-1], expected))
        rows += states.num_positions
    allowed = 1e-4 if dtype == "float32" else 1.5 * rounding
    if worst > allowed or rows != args.requests * (args.input_len + args.output_len - 1):
        raise SystemExit(
            f"hidden states differ from transformers': {rows} rows, relative error {worst:.2e}"
        )
    print(
        f"{rows} rows arrived; largest relative error against fp32 transformers {worst:.2e} "
        f"(allowed {allowed:.2e})"
    )
    return {
        "rows": rows,
        "relative_error": worst,
        "relative_error_of_transformers": rounding,
        "allowed": allowed,
    }


def slice_of_traffic(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run all requests once without hidden states, and return the times and the tokens."""
    gc.collect()
    before = time.process_time()
    elapsed, outputs = run(llm, None, args)
    return {
        "cpu_s": time.process_time() - before,
        "wall_s": elapsed,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def freeze(llm: Any, args: argparse.Namespace) -> None:
    """Exclude all existing objects from later garbage collections."""
    gc.collect()
    gc.freeze()


def count_calls(llm: Any, args: argparse.Namespace) -> int:
    """Return the number of Python and C function calls during one slice, counted by the
    interpreter's profiling hook.
    """
    counter = itertools.count()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(counter)

    gc.collect()
    gc.disable()  # otherwise finalisers would add to the count
    sys.setprofile(note)
    try:
        run(llm, None, args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return next(counter)


def bytes_copied(llm: Any, args: argparse.Namespace) -> int:
    return int(stats(llm)["bytes_copied"])


def unasked(stock: Engine, ours: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of four slices without hidden states. For each round, return the CPU time and the
    elapsed time of the stock engine and of this package's engine.
    """
    for warm_up in (stock, ours) * 3:
        warm_up.call(slice_of_traffic)
    for each in (stock, ours):
        each.call(freeze)
    copied = 0 if args.control else ours.call(bytes_copied)
    rounds: list[dict[str, tuple[float, float]]] = []
    tokens = []
    for number in range(args.pairs):
        order = [stock, ours, ours, stock] if number % 2 == 0 else [ours, stock, stock, ours]
        taken = [(which is ours, which.call(slice_of_traffic)) for which in order]
        tokens += [found["tokens"] for _, found in taken]
        sums = {
            clock: tuple(
                sum(found[clock] for is_ours, found in taken if is_ours is side)
                for side in (False, True)
            )
            for clock in ("cpu_s", "wall_s")
        }
        rounds.append(sums)  # type: ignore[arg-type]
    return {
        "rounds": rounds,
        "same_tokens": all(found == tokens[0] for found in tokens),
        "bytes_copied": 0 if args.control else ours.call(bytes_copied) - copied,
        "calls": [each.call(count_calls) for each in (stock, ours)],
    }


def summary(starts: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    generated = 2 * args.requests * args.output_len

    def compared(clock: str) -> dict[str, Any]:
        logs = [
            [math.log(ours / stock) for stock, ours in (pair[clock] for pair in s["rounds"])]
            for s in starts
        ]
        low, high = confidence_interval(logs)
        sides = zip(*(pair[clock] for start in starts for pair in start["rounds"]), strict=True)
        return {
            "median_ratio_ours_to_stock": round(math.exp(center(logs)), 4),
            "confidence_95": [round(math.exp(low), 4), round(math.exp(high), 4)],
            "medians_of_starts": [round(math.exp(statistics.median(ratios)), 4) for ratios in logs],
            "spread_of_pairs": round(statistics.stdev([x for ratios in logs for x in ratios]), 4),
            "us_per_token": [round(statistics.median(side) / generated * 1e6, 2) for side in sides],
        }

    return {
        "starts": args.starts,
        "pairs_per_start": args.pairs,
        "processor_time": compared("cpu_s"),
        "elapsed_time": compared("wall_s"),
        "python_calls_stock_ours": [start["calls"] for start in starts],
        "same_tokens": all(start["same_tokens"] for start in starts),
        "bytes_copied": sum(start["bytes_copied"] for start in starts),
    }


def center(starts: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.median(pairs) for pairs in starts)


def confidence_interval(starts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval for `center`, resampling the starts and then the pairs
    within each start. Equal arguments always produce the same interval.
    """
    generator = random.Random(0)
    centers = sorted(
        center(
            [
                generator.choices(pairs, k=len(pairs))
                for pairs in generator.choices(starts, k=len(starts))
            ]
        )
        for _ in range(RESAMPLES)
    )
    return centers[int(0.025 * RESAMPLES)], centers[int(0.975 * RESAMPLES)]


def requested(ours: Any, args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Run requests with hidden states, and return the bytes copied from the model's output, the
    bytes requested, the bytes received, and tokens per second.
    """
    from vllm_omni.hidden_states import hidden_states_of

    before = stats(ours)["bytes_copied"]
    elapsed, outputs = run(ours, mode, args)
    received = [hidden_states_of(output) for output in outputs]
    # With `last`, one hidden state per step is copied out of the model, because it is not known in
    # advance which step is the last.
    per_request = {
        "all": args.input_len + args.output_len - 1,
        "generated": args.output_len - 1,
        "last": args.output_len,
    }
    row_bytes = received[0].nbytes // received[0].num_positions
    return {
        "bytes_copied": stats(ours)["bytes_copied"] - before,
        "bytes_asked": per_request[mode] * args.requests * row_bytes,
        "bytes_received": sum(states.nbytes for states in received),
        "tokens_per_s": round(args.requests * args.output_len / elapsed, 1),
    }


if __name__ == "__main__":
    main()
