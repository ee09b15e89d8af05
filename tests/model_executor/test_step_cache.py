# SPDX-License-Identifier: Apache-2.0
"""Which steps a step cache leaves, and that a drawing or video takes the last prediction in the
others.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.model_executor.step_cache import computed_steps, step_cache_meta


def embeddings(*sizes: float) -> torch.Tensor:
    """Of steps: vectors in one direction, so that a change is that of their sizes."""
    return torch.tensor(sizes)[:, None] * torch.tensor([1.0, -2.0, 4.0])


def test_changes_are_bridged_until_their_sum_reaches_the_threshold() -> None:
    """Equal changes: a threshold of 3 computes every third step, 1 every one; whatever their
    size.
    """
    for growth in (1.1, 1.001):
        sizes = [growth**step for step in range(9)]
        third = (True, False, False, True, False, False, True, False, True)
        assert (
            computed_steps(embeddings(*sizes).double(), 3.0)
            == third
            == computed_steps(embeddings(*sizes), 2.5)
        )
        assert all(computed_steps(embeddings(*sizes), 1.0))
    assert computed_steps(embeddings(1, 2, 4, 8, 16).bfloat16(), 2.0) == (
        True,
        False,
        True,
        False,
        True,
    )


def test_a_large_change_is_computed_at_once_and_the_sum_starts_anew() -> None:
    """The mean change is 0.265."""
    sizes = embeddings(1, 1.1, 2.2, 2.3, 2.4, 2.5)
    assert computed_steps(sizes, 1.2) == (True, False, True, False, False, True)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_first_last_and_fixed_steps_are_computed(steps: int) -> None:
    computed = computed_steps(embeddings(*range(1, steps + 1)), 99.0)
    assert computed == tuple(step in (0, steps - 1) for step in range(steps))
    assert computed_steps(embeddings(1, 2, 3, 4, 5), 99.0, {2}) == (True, False, True, False, True)


def test_a_threshold_below_every_change_leaves_nothing_out() -> None:
    assert all(computed_steps(embeddings(1, 1.01, 1.03, 1.04), 1e-6))


def test_embeddings_that_never_change_say_nothing() -> None:
    """So no step is computed for them but the first and the last; zeros are no division by zero."""
    assert computed_steps(embeddings(1, 1, 1, 1), 2.0) == (True, False, False, True)
    assert computed_steps(embeddings(0, 0, 0), 2.0) == (True, False, True)


def test_a_result_says_how_much_was_computed() -> None:
    assert step_cache_meta(None, (True, False)) == {}
    assert step_cache_meta(0.2, (True, False, False, True)) == {
        "step_cache": {"threshold": 0.2, "computed_share": 0.5}
    }


# -- in the models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lance(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm_omni.testing.tiny.lance import make_tiny

    out = tmp_path_factory.mktemp("lance_steps")
    make_tiny(out, 0, "image")
    return load_lance(out)


def load_lance(path: Path) -> Any:
    from vllm_omni.config import OmniConfig
    from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
    from vllm_omni.model_executor.models.lance.checkpoint import find_layout, hf_config
    from vllm_omni.model_executor.models.lance.pipeline import Lance, LanceSetup

    layout = find_layout(path)
    model = Lance(
        LanceSetup.of_checkpoint(
            hf_config(path)["lance"], layout, OmniConfig(), torch.float32, ParallelContext()
        )
    )
    model.load_checkpoint(layout)
    return model


def request(**fields: Any) -> Any:
    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.model_executor.interfaces import DiffusionRequest

    params = DiffusionParams(
        session_id="a", one_shot=True, prompt="a cat", output="latents", **fields
    )
    return DiffusionRequest("a", params, {}, None)


def draw(
    model: Any, *wanted: dict[str, Any]
) -> tuple[list[tuple[dict[str, Any], torch.Tensor]], int]:
    """Drawings at once, step by step; their results, and how many forwards of denoise steps
    there were.
    """
    requests = [request(height=64, width=96, **fields) for fields in wanted]
    forwards = 0
    rows = model.network.velocity

    def counted(hidden: torch.Tensor) -> Any:
        nonlocal forwards
        forwards += 1
        return rows(hidden)

    model.network.velocity = counted
    for each in requests:
        each.session = model.new_session(each.params)
        model.prepare_encode(each)
    while running := [each for each in requests if each.step < each.num_steps]:
        model.step_scheduler(running, model.denoise_step(running))
        for each in running:
            each.step += 1
    del model.network.velocity
    results = [model.post_decode(each) for each in requests]
    return [(meta, tensors["latents"]) for meta, tensors in results], forwards


def test_lance_draws_with_fewer_forwards(lance: Any) -> None:
    ((_, whole),), steps = draw(lance, {"num_inference_steps": 12})
    ((meta, same),), all_steps = draw(
        lance, {"num_inference_steps": 12, "options": {"step_cache": 1e-6}}
    )
    assert torch.equal(same, whole) and steps == all_steps
    assert meta["step_cache"] == {"threshold": 1e-6, "computed_share": 1.0}
    ((meta, cached),), fewer = draw(
        lance, {"num_inference_steps": 12, "options": {"step_cache": 3.0}}
    )
    assert 2 <= fewer < steps and meta["step_cache"]["computed_share"] == pytest.approx(
        fewer / steps, abs=1e-4
    )
    assert 0 < (cached - whole).norm() / whole.norm() < 1


def test_lance_computes_where_guidance_starts_or_ends(lance: Any) -> None:
    """A prediction of one branch is no prediction of two."""
    fields = {
        "num_inference_steps": 12,
        "options": {"step_cache": 100.0, "cfg_interval": [0.6, 0.9]},
    }
    ((meta, latents),), forwards = draw(lance, fields)
    assert forwards == 4 and meta["step_cache"]["computed_share"] == pytest.approx(4 / 12, abs=1e-4)
    assert latents.isfinite().all()


def test_a_generation_alongside_one_that_leaves_steps_out_is_what_it_is_alone(lance: Any) -> None:
    ((_, alone),), _ = draw(lance, {"num_inference_steps": 8, "seed": 2})
    ((_, cached_alone),), _ = draw(
        lance, {"num_inference_steps": 12, "options": {"step_cache": 3.0}}
    )
    ((_, cached), (_, alongside)), _ = draw(
        lance,
        {"num_inference_steps": 12, "options": {"step_cache": 3.0}},
        {"num_inference_steps": 8, "seed": 2},
    )
    torch.testing.assert_close(alongside, alone, atol=2e-5, rtol=0)
    torch.testing.assert_close(cached, cached_alone, atol=2e-5, rtol=0)
