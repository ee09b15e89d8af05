# SPDX-License-Identifier: Apache-2.0
"""A real autoregressive engine with this package's worker and scheduler, and reference hidden
states from Hugging Face Transformers.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, RequestOutput, SamplingParams

from vllm_omni.hidden_states import HiddenStates, HiddenStatesRequest, hidden_states_of

WORKER = "vllm_omni.worker.ARGPUWorker"
SCHEDULER = "vllm_omni.core.sched.ARHiddenStatesScheduler"
PROMPTS = ["the red bird sings in the big tree", "a small blue house", "sea"]


def params(
    mode: str | None = "all", layers: Sequence[int] = (-1,), **fields: Any
) -> SamplingParams:
    """Return greedy sampling parameters for eight tokens. `mode` selects the hidden states; None
    requests none.
    """
    requested = (
        HiddenStatesRequest(hidden_states=mode, layers=tuple(layers)).to_extra_args()
        if mode
        else None
    )  # type: ignore[arg-type]
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "extra_args": requested, **fields}
    )


@contextlib.contextmanager
def running_llm(
    model: Path, omni: dict[str, Any] | None = None, **engine_args: Any
) -> Iterator[LLM]:
    """Run a small `LLM` on `model`, and shut it down at the end."""
    ranks = engine_args.get("tensor_parallel_size", 1) * engine_args.get(
        "pipeline_parallel_size", 1
    )
    cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
    before = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    if ranks > 1:  # Without this variable, vLLM requires a NUMA node for each rank.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    try:
        arguments = {
            "worker_cls": WORKER,
            "scheduler_cls": SCHEDULER,
            "dtype": "float32",
            "max_model_len": 512,
        }
        arguments |= {
            "enforce_eager": True,
            "max_num_seqs": 8,
            "additional_config": {"omni": omni or {}},
        }
        llm = LLM(str(model), **{**arguments, **engine_args})
    finally:
        if before is None:
            os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        else:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = before
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class Reference:
    """Reference hidden states from Hugging Face Transformers, computed in one forward pass over
    each whole sequence.
    """

    def __init__(self, model: Path, loader: Any = None) -> None:
        from transformers import AutoModelForCausalLM

        self.model = (
            (loader or AutoModelForCausalLM).from_pretrained(model, dtype=torch.float32).eval()
        )

    def hidden_states(self, token_ids: Sequence[int], **inputs: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            states = self.model(
                torch.tensor([list(token_ids)]), output_hidden_states=True, **inputs
            ).hidden_states
        return [layer[0] for layer in states]


def states_of(output: RequestOutput) -> HiddenStates:
    states = hidden_states_of(output)
    assert states is not None
    return states


def assert_hidden_states(
    output: RequestOutput, reference: Reference, mode: str = "all", layers: Sequence[int] = (-1,)
) -> None:
    """Check that an output contains the hidden states that `mode` selects, for the right tokens.

    The hidden states must match those of Hugging Face Transformers to within 1e-4. They need not be
    bit-identical, because fp32 sums are computed in a different order.
    """
    token_ids = [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]
    num_prompt = len(output.prompt_token_ids or [])
    computed = range(len(token_ids) - 1)
    positions = {
        "all": list(computed),
        "generated": list(computed[num_prompt:]),
        "last": [computed[-1]],
    }[mode]
    states = states_of(output)
    assert states.positions.tolist() == positions
    assert states.token_ids.tolist() == [token_ids[position] for position in positions]
    assert tuple(states) == tuple(layers)
    expected = reference.hidden_states(token_ids[:-1])
    for layer in layers:
        torch.testing.assert_close(states[layer], expected[layer][positions], atol=1e-4, rtol=1e-4)
