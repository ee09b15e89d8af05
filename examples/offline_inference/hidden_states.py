# SPDX-License-Identifier: Apache-2.0
"""Get a language model's text and hidden states with one call to vLLM's `LLM.generate`.

    python examples/offline_inference/hidden_states.py                     # a tiny random model
    python examples/offline_inference/hidden_states.py --model Qwen/Qwen2.5-0.5B-Instruct --layers
    12 -1

The script prints the text and the shapes of the hidden states for each prompt. `--out
states.safetensors` saves the hidden states of the first prompt.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="checkpoint directory or name (default: write a tiny random model)"
    )
    parser.add_argument(
        "--rows", choices=("all", "generated", "last"), default="all", help="default: all"
    )
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[-1],
        help="layers, numbered as in transformers (default: -1)",
    )
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument(
        "--out", type=Path, help="safetensors file for the hidden states of the first prompt"
    )
    return parser


def main() -> None:
    args = make_parser().parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as folder:
        run(args, args.model or tiny_model(Path(folder)))


def tiny_model(folder: Path) -> str:
    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    return str(write_tiny_language_model(folder))


def run(args: argparse.Namespace, model: str) -> None:
    from vllm import LLM, SamplingParams

    from vllm_omni.hidden_states import HiddenStatesRequest, hidden_states_of, to_safetensors

    options: dict[str, Any] = {
        "hidden_state_layers": [layer for layer in args.layers if layer >= 0]
    }
    llm = LLM(
        model,
        worker_cls="vllm_omni.worker.ARGPUWorker",
        scheduler_cls="vllm_omni.core.sched.ARHiddenStatesScheduler",
        additional_config={"omni": options},
        enforce_eager=True,
        max_model_len=512,
    )
    requested = HiddenStatesRequest(
        hidden_states=args.rows, layers=tuple(args.layers)
    ).to_extra_args()
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, extra_args=requested)
    outputs = llm.generate(["A red bird sings in the tree.", "The sea is"], sampling)
    for output in outputs:
        states = hidden_states_of(output)
        assert states is not None
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        for layer, rows in states.items():
            print(
                f"  layer {layer}: {tuple(rows.shape)} {rows.dtype}, tokens "
                f"{states.positions.tolist()}"
            )
    if args.out:
        first = hidden_states_of(outputs[0])
        assert first is not None
        args.out.write_bytes(to_safetensors(first))
        print(f"wrote {args.out}")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
