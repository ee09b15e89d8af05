# SPDX-License-Identifier: Apache-2.0
"""Tests of videos generated with skipped denoise steps (`options.step_cache`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.wan22_driver import load_model, make_video, start, step

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.outputs import RequestFailed

STEPS: dict[str, Any] = {"num_inference_steps": 10, "output": "latents"}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every subsequent forward pass appends the expert that it runs."""
    from vllm_omni.model_executor.models.wan2_2.transformer import Wan22Transformer

    run, forward = [], Wan22Transformer.forward

    def noted(self: Wan22Transformer, *args: Any) -> torch.Tensor:
        run.append(self.prefix)
        return forward(self, *args)

    monkeypatch.setattr(Wan22Transformer, "forward", noted)
    return run


@pytest.mark.parametrize("kind", ["t2v", "ti2v"])
def test_the_step_cache_saves_forwards_of_a_video(
    checkpoints: dict[str, Path], forwards: list[str], kind: str
) -> None:
    """The step cache never skips the first step of an expert or the last step of the video. A
    threshold below every change between steps skips no step.
    """
    model = load_model(checkpoints[kind])
    whole = make_video(model, **STEPS)[1]["latents"]
    experts = list(dict.fromkeys(forwards))
    assert len(forwards) == 10
    forwards.clear()
    meta, same = make_video(model, **STEPS, options={"step_cache": 1e-9})
    assert torch.equal(same["latents"], whole) and len(forwards) == 10
    assert meta["step_cache"] == {"threshold": 1e-9, "computed_share": 1.0}
    forwards.clear()
    meta, cached = make_video(model, **STEPS, options={"step_cache": 100.0})
    assert len(forwards) == 1 + len(experts) and list(dict.fromkeys(forwards)) == experts
    assert meta["step_cache"]["computed_share"] == len(forwards) / 10
    assert cached["latents"].isfinite().all() and not torch.equal(cached["latents"], whole)


def test_computed_and_skipped_steps_share_no_batch(
    checkpoints: dict[str, Path],
) -> None:
    model = load_model(checkpoints["ti2v"])
    plain, cached = start(model, **STEPS), start(model, **STEPS, options={"step_cache": 100.0})
    assert model.batch_key(plain) == model.batch_key(cached)
    for request in (plain, cached):
        step(model, [request])
    assert model.batch_key(plain) != model.batch_key(cached)


def test_ranks_with_some_of_the_layers_refuse_the_step_cache(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["ti2v"])
    model.parallel = ParallelContext(stage=0, num_stages=2)
    with pytest.raises(RequestFailed, match="ranks with all layers"):
        start(model, **STEPS, options={"step_cache": 2.0})


def test_session_bytes_include_the_cached_prediction(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["ti2v"])
    plain, cached = start(model, **STEPS), start(model, **STEPS, options={"step_cache": 2.0})
    more = model.session_nbytes(cached.params) - model.session_nbytes(plain.params)
    assert more == plain.work.latents.nbytes
