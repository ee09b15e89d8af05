# SPDX-License-Identifier: Apache-2.0
"""Few-step schedules reproduce each public implementation's timestep table, and invalid schedules
are refused.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_omni.model_executor.schedules import (
    ChunkNoise,
    EulerSchedule,
    few_step_schedule,
    unipc_flow_table,
)
from vllm_omni.model_executor.streaming.model import StreamingModel
from vllm_omni.outputs import RequestFailed

_GOLDEN = json.loads((Path(__file__).parents[1] / "golden/lingbot/schedule.json").read_text())
_TWO_STEPS = few_step_schedule("exact", 5.0, [0, 500])
_STEPS = {"v1": (0, 179, 358, 679), "v2": (0, 250, 500, 750)}


def _shift(name: str) -> float:
    match = re.search(r"shift([\d.]+)", name)
    assert match
    return float(match[1])


@pytest.mark.parametrize("name", [name for name in _GOLDEN if name.startswith("original")])
def test_the_original_convention_reproduces_the_integer_table(name: str) -> None:
    """The timesteps t, both sigmas of each step, and the table entries that share a t are identical
    to the original scheduler's.
    """
    rows = _GOLDEN[name]
    schedule = few_step_schedule("original", _shift(name), [row["index"] for row in rows])
    timesteps, sigmas = unipc_flow_table(_shift(name))
    assert schedule.timesteps == tuple(row["t_model"] for row in rows)
    assert schedule.sigmas_x0 == tuple(row["sigma_x0"] for row in rows)
    assert schedule.sigmas_noise == tuple(row["sigma_addnoise"] for row in rows)
    for row in rows:
        assert float(sigmas[row["index"]]) == row["sigma_at_index"]
        assert np.flatnonzero(timesteps == row["t_model"]).tolist() == row["duplicates"]


@pytest.mark.parametrize("name", [name for name in _GOLDEN if not name.startswith("original")])
def test_the_exact_convention_reproduces_the_float_table(name: str) -> None:
    """The fp64 tables agree with the published tables within rounding (1e-9). SGLang's table, which
    is computed in fp32, is reproduced bit for bit.
    """
    rows = _GOLDEN[name]
    indices = [
        row.get("idx", index)
        for row, index in zip(rows, _STEPS["v2" if "v2" in name else "v1"], strict=True)
    ]
    if name.startswith("sglang"):
        schedule = few_step_schedule("exact", _shift(name), indices, np.float32)
        assert schedule.timesteps == tuple(row["t_model"] for row in rows)
        assert schedule.sigmas_x0 == tuple(row["sigma"] for row in rows)
    else:
        schedule = few_step_schedule("exact", _shift(name), indices)
        assert schedule.timesteps == pytest.approx([row["t_model"] for row in rows], abs=1e-9)
        assert schedule.sigmas_x0 == pytest.approx([row["sigma"] for row in rows], abs=1e-9)
    assert schedule.sigmas_noise == schedule.sigmas_x0


@pytest.mark.parametrize(
    ("shift", "indices", "message"),
    [
        (0.0, [0], "shift must be > 0"),
        (5.0, [], "strictly increasing"),
        (5.0, [3, 3], "strictly increasing"),
        (5.0, [0, 1000], r"in \[0, 999\]"),
    ],
)
def test_bad_schedules_are_refused(shift: float, indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        few_step_schedule("exact", shift, indices)


def test_the_log_probability_is_that_of_a_gaussian() -> None:
    """The log-probability equals that of a Gaussian with mean (1 - sigma) x0. Given frames are not
    random, so they do not contribute to the log-probability.
    """
    schedule = few_step_schedule("exact", 5.0, [0, 500, 900])
    noise = ChunkNoise((4, 3, 2, 2), 7, 1, torch.device("cpu"))
    latents, flow = (torch.randn(4, 3, 2, 2) for _ in range(2))
    for step in range(2):
        after = schedule.advance(latents, flow, step, noise).double()
        sigma = schedule.sigmas_noise[step + 1]
        mean = (1 - sigma) * (latents.double() - schedule.sigmas_x0[step] * flow.double())
        each = torch.distributions.Normal(mean, sigma).log_prob(after)
        for given in (0, 1):
            log_prob = schedule.log_prob(step, noise, given)
            assert float(log_prob) == pytest.approx(float(each[:, given:].sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "stages", "first_chunk_steps", "said"),
    [
        (EulerSchedule((1.0, 0.0), torch.float32), 1, None, "draws no noise between its steps"),
        (_TWO_STEPS, 2, None, "only servers with one pipeline stage"),
        (_TWO_STEPS, 1, 1, r"without omni\.model\.first_chunk_steps"),
    ],
)
def test_a_trajectory_is_refused_where_it_has_no_meaning(
    schedule: Any, stages: int, first_chunk_steps: int | None, said: str
) -> None:
    model: Any = SimpleNamespace(
        parallel=SimpleNamespace(num_stages=stages),
        omni=SimpleNamespace(vae_stage=False),
        options=SimpleNamespace(first_chunk_steps=first_chunk_steps),
    )
    request: Any = SimpleNamespace(work=SimpleNamespace(schedule=schedule))
    with pytest.raises(RequestFailed, match=said):
        StreamingModel.record_trajectory(model, request)
