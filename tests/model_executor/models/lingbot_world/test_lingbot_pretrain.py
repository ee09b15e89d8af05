# SPDX-License-Identifier: Apache-2.0
"""The undistilled LingBot v2 uses two K/V windows per session, one solver per chunk, and guidance.
Other tests compare the computed values with recorded tensors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import finish, step
from lingbot_world_driver import HEIGHT, WIDTH, load_world, make_request, open_session, run_chunk

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.lingbot_world.family import FAMILY
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.pretrain import (
    NEGATIVE_PROMPT,
    STEPS,
    GuidedWindows,
    LingBotPretrain,
)
from vllm_omni.outputs import RequestFailed

PROMPT = "a beach"


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lingbot_world", "v2_pretrain")


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> LingBotWorld:
    return load_world(checkpoint, kind=LingBotPretrain)


def latents(world: LingBotWorld, session_id: str, chunks: int, **params: int) -> torch.Tensor:
    session = open_session(world, session_id, output="latents")
    made = []
    for index in range(chunks):
        prompt = {"prompt": PROMPT} if index == 0 else {}
        made.append(
            run_chunk(world, session, output="latents", **prompt, **params)[1]["latents"].clone()
        )
    return torch.cat(made, dim=1)


def test_the_layout_selects_the_pretrained_pipeline(checkpoint: Path) -> None:
    """A directory with `transformer_causal/`, or with `WanModelCausal` in its config, is served
    with guidance and 40 steps.
    """
    found = find_layout(checkpoint)
    assert (found.version, found.mode, found.release()) == (
        "v2",
        "pretrain",
        "lingbot_world_v2_14b_pretrain",
    )
    assert FAMILY.hf_config(checkpoint)["architectures"] == ["LingBotPretrainPipeline"]


def test_a_chunk_has_forty_steps_and_a_clean_context_pass(world: LingBotWorld) -> None:
    request = make_request(world, open_session(world), prompt=PROMPT)
    world.prepare_encode(request)
    assert request.num_steps == STEPS + 1
    assert (
        world.schedule.timesteps[:3] == (999.0, 994.0, 989.0)
        and world.schedule.timesteps[-1] == 113.0
    )


def test_every_chunk_restarts_its_solver(world: LingBotWorld) -> None:
    """Every chunk starts with a fresh solver, so a chunk aborted between solver steps leaves no
    trace in the next chunk.
    """
    session = open_session(world, "left", output="latents")
    left = make_request(world, session, prompt=PROMPT, output="latents")
    world.prepare_encode(left)
    for _ in range(5):
        step(world, [left])
    first = run_chunk(world, session, prompt=PROMPT, output="latents")[1]["latents"]
    assert torch.equal(first, latents(world, "straight", 1))


def test_latents_depend_on_both_prompts(
    world: LingBotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = latents(world, "own", 2)
    assert torch.isfinite(own).all() and own.std() > 0.1
    monkeypatch.setattr(
        "vllm_omni.model_executor.models.lingbot_world.pretrain.NEGATIVE_PROMPT", "rain"
    )
    other = latents(world, "other", 2)
    assert (own - other).abs().max() > 1e-3
    assert NEGATIVE_PROMPT.startswith("\u753b\u9762\u7a81\u53d8")


def test_two_sessions_in_one_forward_equal_each_alone(world: LingBotWorld) -> None:
    """Two sessions at the same step share one forward pass for both guidance branches, and each
    session produces the same latents as when it runs alone.
    """
    alone = [latents(world, f"alone{seed}", 1, seed=seed) for seed in (1, 2)]
    requests = []
    for seed in (1, 2):
        session = open_session(world, f"both{seed}", output="latents")
        requests.append(make_request(world, session, prompt=PROMPT, seed=seed, output="latents"))
        world.prepare_encode(requests[-1])
    for _ in range(STEPS + 1):
        step(world, requests)
    for request, expected in zip(requests, alone, strict=True):
        made = finish(world, request)[1]["latents"]
        assert (made - expected).norm() / expected.norm() < 1e-4


def test_a_session_and_its_fork_have_two_windows(world: LingBotWorld) -> None:
    """A session's memory size includes both windows, and a fork continues with the same latents as
    the original session.
    """
    session = open_session(world, "forked", output="latents")
    assert isinstance(session.window, GuidedWindows)
    assert session.window.nbytes == world.window_nbytes(session.shape)
    assert world.window_nbytes(session.shape) == 2 * LingBotWorld.window_nbytes(
        world, session.shape
    )
    run_chunk(world, session, prompt=PROMPT, output="latents")
    cond, uncond = session.window.windows
    assert not torch.equal(cond.buffer, uncond.buffer)
    assert {name.split(".")[0] for name in session.window.tensors(3)} == {"cond", "uncond"}
    other = session.fork("other")
    ours = run_chunk(world, session, output="latents")[1]["latents"].clone()
    assert torch.equal(run_chunk(world, other, output="latents")[1]["latents"], ours)


def test_attention_is_global_unless_a_window_is_set(checkpoint: Path, world: LingBotWorld) -> None:
    """Without a window, a session ends after 21 latent frames, as in the original implementation.
    Windows are an extension that this package adds.
    """
    assert (world.plan.window_frames, world.plan.sink_frames) == (21, 21)
    with pytest.raises(RequestFailed, match="global attention holds 21 latent frames"):
        open_session(world).window.check_frames(range(21, 24))
    assert (
        load_world(
            checkpoint, kind=LingBotPretrain, window_frames=9, sink_frames=3
        ).plan.window_frames
        == 9
    )


@pytest.mark.parametrize(
    "options", [{"denoise_indices": [0, 500]}, {"max_steps": 2}, {"first_chunk_steps": 2}]
)
def test_options_of_the_distilled_schedule_are_refused(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options)
    assert FAMILY.check_options is not None
    with pytest.raises(
        ValueError,
        match=f"{next(iter(options))} applies to distilled models; this one has 40 UniPC steps",
    ):
        FAMILY.check_options(FAMILY.hf_config(checkpoint), omni)
