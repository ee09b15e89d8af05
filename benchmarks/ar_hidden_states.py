# SPDX-License-Identifier: Apache-2.0
"""Cost of hidden states: this package's AR worker compared with vLLM's, in pairs.

    python benchmarks/ar_hidden_states.py                 a tiny model on CPU
    python benchmarks/ar_hidden_states.py --model large   about a billion random weights, for a GPU

    # the figure to quote from a CPU: about 8 minutes
    python benchmarks/ar_hidden_states.py --starts 4 --pairs 300
    # stock vLLM beside stock vLLM: the method's own error
    python benchmarks/ar_hidden_states.py --control

Two engines live at the same time, each in one process of its own without helpers (front end,
scheduler, worker and model), so that the processor time of the process is the whole cost of its
requests and nobody waits by spinning. They take turns on the same requests in short slices, stock
ours ours stock, so that a machine that is busy or drifts hits both. On a CPU both have one thread
on the same core, the same hash seed, and start each slice right after a garbage collection. A pair
is one such round: (our two slices / stock's two).

Reported for traffic that does not ask: the median over pairs, of processor seconds and of elapsed
seconds, each with a 95 % confidence interval. How a process's memory happens to lie can favour one
engine for as long as it lives, which no number of pairs shows; so engines are started `--starts`
times, the ratio is the geometric mean of the starts' medians, and the interval resamples starts
first and pairs within them (bootstrap). Processor seconds are the figure to quote from a machine
that others use too; on a GPU, elapsed seconds. Beside it, free of noise: the calls that Python
counts in the same slice of each. For traffic that asks: the bytes copied against the bytes asked
for, and tokens per second. Before that, rows must have arrived and equal a plain transformers
forward.
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
    # everything of an engine in the process that is measured
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
    """An engine in a process of its own, called from here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, work: Any, *arguments: Any) -> Any:
        """`work(llm, args, *arguments)`, over there. Raises RuntimeError if it failed."""
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
    """In the child: start an engine, answer calls until the parent hangs up."""
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
    """Generate for all requests; seconds and outputs.

    Token ids are given, so that no tokenizer is timed.
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
    """Rows of every request against a plain fp32 forward; ends the benchmark if they are missing or
    wrong.

    bf16 rounds after every operation and the error grows with depth, so transformers' own bf16 rows
    give this model's rounding error: ours may be 1.5 times as far from the fp32 rows. fp32 rows
    agree to 1e-4.
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
    """One run of requests without hidden states: times, and tokens."""
    gc.collect()
    before = time.process_time()
    elapsed, outputs = run(llm, None, args)
    return {
        "cpu_s": time.process_time() - before,
        "wall_s": elapsed,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def freeze(llm: Any, args: argparse.Namespace) -> None:
    """The garbage collector never scans the objects that exist now again."""
    gc.collect()
    gc.freeze()


def count_calls(llm: Any, args: argparse.Namespace) -> int:
    """Calls of Python and C functions during one slice, as the interpreter's profiling hook sees
    them.
    """
    counter = itertools.count()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(counter)

    gc.collect()
    gc.disable()  # finalisers would be counted where they happen to run
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
    """Rounds of four slices: per round (stock's seconds, ours) of both clocks."""
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
    """95 % interval of `center`: starts drawn anew, and pairs within each; the same values give
    the same interval.
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
    """Bytes copied from the model's output against the bytes of the rows that were asked for."""
    from vllm_omni.hidden_states import hidden_states_of

    before = stats(ours)["bytes_copied"]
    elapsed, outputs = run(ours, mode, args)
    received = [hidden_states_of(output) for output in outputs]
    # `last` is one row per step on its way out of the model, since no step knows that it is the
    # last.
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
