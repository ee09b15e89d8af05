# SPDX-License-Identifier: Apache-2.0
"""The token2wav model in the diffusion runner produces the same audio as
`Qwen2_5OmniToken2WavModel` from Hugging Face Transformers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.host_capture import hold
from helpers.scheduling import execute, new_request, run_to_end, step
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniToken2WavModel

from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import CheckpointTensors, load_voices
from vllm_omni.outputs import RequestFailed

CODES = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(3))
SAMPLES_PER_CODE = 480
FEW_STEPS = {"num_inference_steps": 3}
SHORT: dict[str, Any] = {"model": {"max_codes": 64}}
"""Options with a limit that is large enough for `CODES` but small enough for a fast warm-up, which
runs the longest clip that a runner accepts.
"""


@pytest.fixture(scope="module")
def reference(qwen2_5_omni: Path) -> Callable[..., torch.Tensor]:
    """Return a function, called as `reference(codes, seed, voice, **options)`, that computes a
    waveform with Hugging Face Transformers.
    """
    config = Qwen2_5OmniConfig.from_pretrained(qwen2_5_omni).token2wav_config
    model = Qwen2_5OmniToken2WavModel(config).float().eval()
    model.load_state_dict(dict(CheckpointTensors(qwen2_5_omni).below("token2wav.")), strict=False)
    voices = load_voices(qwen2_5_omni)

    @torch.no_grad()
    def run(codes: torch.Tensor, seed: int, voice: str = "Chelsie", **options: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        speaker = voices[voice]
        wave: torch.Tensor = model(
            codes[None], conditioning=speaker.cond, reference_mel=speaker.ref_mel, **options
        )
        return wave.reshape(-1)

    return run


def speech(name: str, codes: torch.Tensor = CODES, voice: str = "Chelsie", **fields: Any) -> Any:
    options = {"voice": voice, **fields.pop("options", {})}
    return new_request(
        name, {"codes": codes}, session_id=name, one_shot=True, options=options, **fields
    )


def test_a_whole_clip_equals_transformers(
    qwen2_5_omni: Path, make_runner: Any, reference: Callable[..., torch.Tensor]
) -> None:
    """The waveform is the same as from Transformers with the same codes, seed and voice, both for a
    single request and in a batch of different requests.
    """
    runner = make_runner(qwen2_5_omni, {**SHORT, "batch_invariant": False})
    short = CODES[:31]
    results = run_to_end(
        runner,
        speech("a", seed=7),
        speech("b", seed=8, voice="Ethan", guidance_scale=0.0, num_inference_steps=4),
        speech("c", short, seed=9, num_inference_steps=5, options={"sway_coefficient": 0.0}),
        speech("d", seed=10, guidance_scale=1.5, num_inference_steps=4),
    )
    expected = {
        "a": reference(CODES, 7),
        "b": reference(CODES, 8, "Ethan", guidance_scale=0.0, num_steps=4),
        "c": reference(short, 9, num_steps=5, sway_coefficient=0.0),
        "d": reference(CODES, 10, guidance_scale=1.5, num_steps=4),
    }
    for name, wave in expected.items():
        meta, tensors = results[name]
        assert meta["sample_rate"] == 24_000
        assert tensors["audio"].dtype == torch.float32 and wave.std() > 1e-4
        assert tensors["audio"].shape == wave.shape
        # Batching changes the order of summation.
        torch.testing.assert_close(tensors["audio"], wave, atol=1e-5, rtol=0)
    alone = run_to_end(make_runner(qwen2_5_omni, SHORT), speech("e", seed=7))["e"][1]["audio"]
    assert torch.equal(alone, expected["a"])


def test_a_part_with_enough_context_equals_the_clip(qwen2_5_omni: Path, make_runner: Any) -> None:
    """The noise for a code depends on the code's index, so a part that has the whole clip as
    context contains the same samples as the clip.
    """
    runner = make_runner(qwen2_5_omni, SHORT)
    results = run_to_end(
        runner,
        speech("clip", seed=4, options={"first_code": 0}, **FEW_STEPS),
        speech(
            "piece",
            seed=4,
            options={"first_code": 0, "left_codes": 12, "right_codes": 20},
            **FEW_STEPS,
        ),
        speech(
            "later", CODES[12:], seed=4, options={"first_code": 12, "left_codes": 24}, **FEW_STEPS
        ),
    )
    clip, part, later = (results[name][1]["audio"] for name in ("clip", "piece", "later"))
    assert torch.equal(part, clip[12 * SAMPLES_PER_CODE : 30 * SAMPLES_PER_CODE])
    assert later.numel() == 14 * SAMPLES_PER_CODE
    same = clip[36 * SAMPLES_PER_CODE :]
    # The samples are only close to those of the clip, because distant context is missing.
    assert float((later - same).abs().mean()) < 0.2 * float(same.std())


def test_regular_parts_use_a_graph_and_clips_do_not(qwen2_5_omni: Path, make_runner: Any) -> None:
    """Regular parts, which consist of whole attention blocks of 12 codes, replay a CUDA graph, even
    if the codes, voice, seed and guidance change. Whole clips run without a graph.
    """
    stock, runner = make_runner(qwen2_5_omni, SHORT), make_runner(qwen2_5_omni, SHORT)
    graphs = runner.model.flow.graphs = ForwardGraphs(capture=hold)
    other: dict[str, Any] = {"voice": "Ethan", "seed": 5, "guidance_scale": 1.5}
    for name, codes, options, fields in (
        ("clip", CODES[:36], {}, {}),
        ("end", CODES[:37], {"first_code": 0}, {}),
        ("piece", CODES[:36], {"first_code": 0, "right_codes": 12}, {}),
        ("next", CODES[12:48], {"first_code": 12, "left_codes": 12, "right_codes": 12}, other),
    ):
        fields = {"seed": 2, **FEW_STEPS, **fields}
        plain, ours = (
            run_to_end(each, speech(name, codes, options=options, **fields))[name][1]["audio"]
            for each in (stock, runner)
        )
        assert torch.equal(ours, plain)
        assert len(graphs) == (name in ("piece", "next"))


WRONG = (
    (torch.tensor([1, 99]), {}, "invalid_codes", "0 to 71"),
    (torch.tensor([-1]), {}, "invalid_codes", "-1"),
    (torch.zeros(0, dtype=torch.int64), {}, "invalid_request", "N >= 1"),
    (torch.rand(4), {}, "invalid_request", "integers"),
    (torch.zeros(65, dtype=torch.int64), {}, "invalid_request", "65 codes"),
    (CODES, {"voice": "Nobody"}, "invalid_request", "Chelsie, Ethan"),
    (CODES, {"speed": 2}, "invalid_request", "allowed keys"),
    (CODES, {"left_codes": 30, "right_codes": 20}, "invalid_request", "leave nothing"),
)


def test_a_wrong_request_fails_alone(qwen2_5_omni: Path, make_runner: Any) -> None:
    """Each invalid request in a batch fails with its own code and message, while a valid request in
    the same batch is served.
    """
    runner = make_runner(qwen2_5_omni, {**SHORT, "max_sessions": 16})
    bad = [
        speech(f"bad{number}", codes, options=options)
        for number, (codes, options, _, _) in enumerate(WRONG)
    ]
    results = run_to_end(runner, *bad, speech("good"))
    for number, (_, _, code, says) in enumerate(WRONG):
        failure = results[f"bad{number}"]
        assert isinstance(failure, RequestFailed)
        assert failure.code == code and says in failure.message
    assert results["good"][1]["audio"].numel() == CODES.numel() * SAMPLES_PER_CODE


def test_a_request_may_be_aborted_between_intervals(qwen2_5_omni: Path, make_runner: Any) -> None:
    """A request with nine intervals takes nine engine steps. Aborting the request after the second
    step frees the request and its session.
    """
    runner = make_runner(qwen2_5_omni, SHORT)
    assert execute(runner, step(new=[speech("gone")])) == {"gone": None}
    assert execute(runner, step(running=["gone"])) == {"gone": None}
    execute(runner, step(finished=["gone"]))
    assert len(runner.requests) == 0 and len(runner.sessions) == 0
