#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Start three tiny models in the real engine to check whether the installed vLLM works.

    python scripts/start_tiny_models.py                     # the world, the stream, the language
        model
    python scripts/start_tiny_models.py ar --limit-s 120    # one of them

Each model runs in its own process and prints one line: versions, device, runner, seconds and a
digest of its result. If two vLLM versions print equal digests, their results are bit-identical.
Different digests are not necessarily an error. The script checks that shapes are correct and values
are finite and, for the language model, that its hidden states match those of Hugging Face
Transformers to within bf16 precision. The exit status is 1 if a model failed. The rows of
docs/architecture/compatibility.md come from this script.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZE = {"height": 32, "width": 48}
CHUNKS = 3
PROMPTS = ("the red bird sings in the big tree", "a small blue house")
_LINE = '{"model": '
LARGEST_ERROR = 0.3
"""Largest accepted relative error of hidden states, compared with Hugging Face Transformers in
fp32.

With random weights, bf16 causes an error of 0.1. If the hidden states belonged to a wrong token,
the error would be 1 or more.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--limit-s", type=float, default=300, help="for each (default: 300)")
    parser.add_argument(
        "--eager",
        action="store_true",
        help="the language model without compilation and CUDA graphs",
    )
    parser.add_argument(
        "--here", action="store_true", help="run the one model named, in this process"
    )
    return parser


def main() -> int:
    args = make_parser().parse_args()
    if unknown := sorted(set(args.models) - set(MODELS)):
        raise SystemExit(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if args.here:
        print(json.dumps(run(args.models[0], args.eager)), flush=True)
        return 0
    failed = [name for name in args.models or MODELS if not start(name, args.limit_s, args.eager)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def start(name: str, limit_s: float, eager: bool = False) -> bool:
    """Run one model in another process and print its line, or its log if it failed."""
    command = [sys.executable, __file__, name, "--here", *["--eager"] * eager]
    try:
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        output, ended = result.stdout, f"exit status {result.returncode}"
    except subprocess.TimeoutExpired as expired:
        output, ended = (
            (expired.stdout or b"").decode(errors="replace"),
            f"more than {limit_s:.0f} s",
        )
    # The engine may log lines after the result.
    found = [line for line in output.splitlines() if line.startswith(_LINE)]
    if ended == "exit status 0" and found:
        print(found[-1], flush=True)
        return True
    print(f"{name}: {ended}\n" + "\n".join(output.splitlines()[-60:]), flush=True)
    return False


def run(name: str, eager: bool) -> dict[str, Any]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch
    import vllm

    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = MODELS[name](Path(folder), eager)
    return {
        "model": name,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": round(time.perf_counter() - started_s, 1),
        **found,
    }


def video(family: str, folder: Path, **fields: Any) -> dict[str, Any]:
    """Generate several chunks of one session and return their latents. The model is not compiled,
    because compilation would dominate the time.
    """
    import torch
    from vllm import LLM

    from vllm_omni.inputs import DiffusionParams, engine_prompt
    from vllm_omni.model_executor.models.registry import get_family
    from vllm_omni.outputs import unpack

    get_family(family).make_tiny(folder, 0, "original")
    llm = LLM(
        model=str(folder),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        additional_config={"omni": {**SIZE, "model": {"window_frames": 7, "sink_frames": 2}}},
    )
    image = (torch.arange(32 * 48 * 3).view(32, 48, 3) % 251).to(torch.uint8)
    latents = []
    for index in range(CHUNKS):
        first = index == 0
        params = DiffusionParams(
            session_id="s",
            chunk_index=index,
            prompt="a field" if first else None,
            seed=7 if first else None,
            output="latents",
            **fields,
        )
        tensors = {"image": image} if first and "actions" in fields else {}
        (output,) = llm.encode(
            [engine_prompt()],
            params.to_pooling_params(tensors),
            pooling_task="plugin",
            use_tqdm=False,
        )
        _, results = unpack(output.outputs.data)
        latents.append(results["latents"].clone())
    made = torch.cat([chunk.flatten() for chunk in latents]).float()
    assert torch.isfinite(made).all() and made.std() > 0.1, (
        f"latents of {family}: std {made.std():.3f}"
    )
    return {
        "shapes": [list(chunk.shape) for chunk in latents],
        "std": round(made.std().item(), 4),
        "digest": digest(made),
    }


def world(folder: Path, eager: bool) -> dict[str, Any]:
    return video("lingbot_world", folder, actions=[["w"]] * 3)


def stream(folder: Path, eager: bool) -> dict[str, Any]:
    return video("causal_wan", folder)


def ar(folder: Path, eager: bool) -> dict[str, Any]:
    """Generate text with the hidden states of two layers, and compare these hidden states with
    those of Hugging Face Transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from vllm_omni.hidden_states import HiddenStatesRequest, hidden_states_of
    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    size = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    write_tiny_language_model(folder, dtype="bfloat16", **size)
    llm = LLM(
        str(folder),
        worker_cls="vllm_omni.worker.ARGPUWorker",
        scheduler_cls="vllm_omni.core.sched.ARHiddenStatesScheduler",
        additional_config={"omni": {"hidden_state_layers": [2]}},
        max_model_len=512,
        enforce_eager=eager,
        gpu_memory_utilization=0.2,
    )
    requested = HiddenStatesRequest(hidden_states="all", layers=(2, -1)).to_extra_args()
    outputs = llm.generate(
        list(PROMPTS), SamplingParams(temperature=0, max_tokens=12, extra_args=requested)
    )
    stats = llm.collective_rpc("hidden_states_stats")[0]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    everything, error = [], 0.0
    for output in outputs:
        states = hidden_states_of(output)
        assert states is not None, "no rows arrived"
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        assert states.token_ids.tolist() == tokens
        with torch.no_grad():
            expected = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for layer in (2, -1):
            rows, want = states[layer].float(), expected[layer][0]
            error = max(error, ((rows - want).norm() / want.norm()).item())
            everything.append(rows.flatten())
    assert error < LARGEST_ERROR, f"rows are {error:.3f} off transformers'"
    return {
        "runner": stats["runner"],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "largest_relative_error": round(error, 4),
        "digest": digest(torch.cat(everything)),
    }


def digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()[:16]


MODELS = {"world": world, "stream": stream, "ar": ar}

if __name__ == "__main__":
    sys.exit(main())
