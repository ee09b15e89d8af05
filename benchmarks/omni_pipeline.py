#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time to first text and first sound of a speaking model, and where the time goes, over three real engines.

Without `--model` a tiny random Qwen2.5-Omni is made: the numbers are then those of engines, transport and queues.

    python benchmarks/omni_pipeline.py --requests 20
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import common


async def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    import msgspec
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    from vllm_omni.model_executor.models.qwen2_5_omni.options import StageOptions
    from vllm_omni.model_executor.models.qwen2_5_omni.speech import Timings
    from vllm_omni.model_executor.models.qwen2_5_omni.stages import SpeechEngines

    start = time.perf_counter()
    talker = {"enforce_eager": args.enforce_eager, "max_model_len": args.max_model_len, "max_num_seqs": 4}
    engines = await SpeechEngines.start(
        model,
        StageOptions(talker=talker),
        enforce_eager=args.enforce_eager,
        max_model_len=args.max_model_len,
        max_num_seqs=4,
        skip_mm_profiling=True,
        limit_mm_per_prompt={"image": 0, "audio": 0, "video": 0},
    )
    startup_s = time.perf_counter() - start
    composition = engines.composition
    rows: dict[str, list[float]] = {}
    sound_s: list[float] = []
    try:
        for how_name, chunk in (("streamed", args.chunk_codes), ("whole_clip", 0)):
            how = msgspec.structs.replace(composition.defaults, chunk_codes=chunk, max_codes=args.codes)
            for number in range(args.warmup + args.requests):
                timings = Timings()
                prompt = tokens_input(prompt_token_ids=list(range(5, 5 + args.prompt_tokens)))
                params = SamplingParams(max_tokens=args.reply_tokens, ignore_eos=True, seed=number)
                samples = 0
                name = f"{how_name}-{number}"
                async for event in composition.respond(prompt, params, name, how, seed=number, timings=timings):
                    samples += len(event.samples) if hasattr(event, "samples") else 0
                if number < args.warmup:
                    continue
                for mark, seconds in timings.marks_s.items():
                    rows.setdefault(f"{how_name}.{mark}", []).append(seconds * 1e3)
                sound_s.append(samples / 24_000)
    finally:
        engines.shutdown()
    return {
        "model": "tiny random Qwen2.5-Omni" if args.model is None else str(args.model.name),
        "startup_s": round(startup_s, 2),
        "prompt_tokens": args.prompt_tokens,
        "reply_tokens": args.reply_tokens,
        "max_codes": args.codes,
        "chunk_codes": args.chunk_codes,
        "requests": args.requests,
        "seconds_of_sound": common.quantiles(sound_s),
        "milliseconds_since_arrival": {name: common.quantiles(values) for name, values in rows.items()},
        "note": "`token2wav` is the sum over pieces; every other mark counts from the request's arrival",
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Qwen2.5-Omni checkpoint; a tiny one is made if left out")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--reply-tokens", type=int, default=24)
    parser.add_argument("--codes", type=int, default=96, help="longest speech, in codes (50 a second)")
    parser.add_argument("--chunk-codes", type=int, default=24)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=True)
    common.add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    common.restart_with({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            from vllm_omni.model_executor.models.registry import get_family

            model = Path(folder) / "tiny"
            get_family("qwen2_5_omni").make_tiny(model, 0, "original")
        result = asyncio.run(measure(model, args))
    common.save("omni_pipeline", result, args)


if __name__ == "__main__":
    main()
