# SPDX-License-Identifier: Apache-2.0
"""Tests of the conversion of controls to the action values that each latent frame sees, and of
invalid controls.
"""

from typing import Any

import pytest
import torch
from matrix_game_driver import GOLDEN
from safetensors.torch import load_file

from vllm_omni.actions import ActionFrame, read_actions
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.matrix_game.config import VARIANTS, MatrixGameVariant
from vllm_omni.model_executor.models.matrix_game.state import action_values, action_windows
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.request import read_action_frames
from vllm_omni.outputs import RequestFailed

UNIVERSAL, GTA, TEMPLERUN = VARIANTS
PLAN = ChunkPlan(3, 3, 6, 0)


def values(variant: MatrixGameVariant, *entries: Any) -> list[list[float]]:
    rows = read_actions(variant.space, list(entries), {}, len(entries))
    assert rows is not None
    return [[round(value, 4) for value in row] for row in action_values(rows, variant).tolist()]


def rows(
    chunk_index: int, entries: list[Any] | None = None, **tensors: torch.Tensor
) -> torch.Tensor:
    params = DiffusionParams(session_id="a", actions=entries)
    return action_values(
        read_action_frames(params, tensors, UNIVERSAL.space, PLAN, chunk_index), UNIVERSAL
    )


@pytest.mark.parametrize(
    ("variant", "entry", "row"),
    [
        (UNIVERSAL, [], [0, 0, 0, 0, 0, 0]),
        (UNIVERSAL, ["w", "a"], [1, 0, 1, 0, 0, 0]),
        (UNIVERSAL, ["s", "d"], [0, 1, 0, 1, 0, 0]),
        (UNIVERSAL, ["i", "l"], [0, 0, 0, 0, 0.1, 0.1]),
        (UNIVERSAL, ["k", "j"], [0, 0, 0, 0, -0.1, -0.1]),
        (UNIVERSAL, ["i", "k"], [0, 0, 0, 0, 0, 0]),
        (
            UNIVERSAL,
            ActionFrame(buttons=("w", "l"), axes={"yaw": -0.3, "pitch": 0.2}),
            [1, 0, 0, 0, 0.2, -0.2],
        ),
        (GTA, ["w", "a"], [1, 0, 0, -0.1]),
        (GTA, ["s", "d"], [0, 1, 0, 0.1]),
        (GTA, ActionFrame(axes={"yaw": 0.05}), [0, 0, 0, 0.05]),
        (TEMPLERUN, [], [1, 0, 0, 0, 0, 0, 0]),
        (TEMPLERUN, ["jump"], [0, 1, 0, 0, 0, 0, 0]),
        (TEMPLERUN, ["right"], [0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_controls_become_the_values_of_the_variant(
    variant: MatrixGameVariant, entry: Any, row: list[float]
) -> None:
    assert values(variant, entry) == [row]


@pytest.mark.parametrize(
    ("variant", "entry", "reason"),
    [
        (GTA, ["j"], "this model takes buttons w, s, a, d; axes yaw"),
        (GTA, ActionFrame(axes={"pitch": 0.1}), "this model takes buttons w, s, a, d; axes yaw"),
        (TEMPLERUN, ["jump", "left"], "one at a time"),
        (
            TEMPLERUN,
            ActionFrame(axes={"yaw": 0.1}),
            "buttons jump, slide, turn_left, turn_right, left, right",
        ),
        (UNIVERSAL, ActionFrame(axes={"yaw": 2.0}), "must lie in"),
        (UNIVERSAL, ActionFrame(scroll=1.0), "scrolls"),
    ],
)
def test_unsupported_controls_are_refused(
    variant: MatrixGameVariant, entry: Any, reason: str
) -> None:
    with pytest.raises(RequestFailed, match=reason):
        values(variant, entry)


def test_an_entry_applies_to_the_video_frames_of_its_latent_frame() -> None:
    """An `actions` entry applies to the video frames of its latent frame: one for latent frame 0
    and four for each later latent frame. A missing entry means that no key is held.
    """
    assert rows(0, [["w"], ["s"]])[:, :2].tolist() == [[1, 0]] + [[0, 1]] * 4 + [[0, 0]] * 4
    assert (
        rows(1, [["w"], ["s"], ["w"]])[:, :2].tolist() == [[1, 0]] * 4 + [[0, 1]] * 4 + [[1, 0]] * 4
    )
    assert rows(1).tolist() == [[0.0] * 6] * 12


def test_tensors_have_entries_per_latent_or_per_video_frame() -> None:
    held = torch.zeros(3, 8)
    held[1, 0] = 1
    assert torch.equal(rows(1, buttons=held), rows(1, [[], ["w"], []]))
    fine = torch.zeros(12, 8)
    fine[5, 0] = fine[5, 5] = 1
    yaw = torch.full((12, 2), 0.25)
    seen = rows(1, buttons=fine, axes=yaw)
    assert seen[:, 0].nonzero().tolist() == [[5]]
    assert seen[5].tolist() == pytest.approx([1, 0, 0, 0, 0.15, 0.25])
    with pytest.raises(RequestFailed, match=r"shape \[3, 8\]"):
        rows(1, buttons=torch.zeros(9, 8))
    with pytest.raises(RequestFailed, match="one of the two"):
        rows(1, [["w"]], buttons=fine)


def test_a_latent_frame_sees_twelve_video_frames_but_not_its_own_last() -> None:
    """Latent frame k sees the actions of video frames 4 k - 12 to 4 k - 1. The first frame's action
    stands in for the missing actions before it.
    """
    clip = torch.arange(33.0).unsqueeze(1)
    before, seen = None, []
    for frames in (range(9), range(9, 21), range(21, 33)):
        windows, before = action_windows(clip[frames.start : frames.stop], before, 3, 12)
        seen += windows.squeeze(-1).tolist()
        assert before.squeeze(-1).tolist() == [*range(frames.stop - 9, frames.stop)]
    assert seen == [[float(max(0, index)) for index in range(4 * k - 12, 4 * k)] for k in range(9)]


def test_an_action_per_chunk_gives_the_recorded_values() -> None:
    """If a chunk has one action, it applies to all of the chunk's video frames, as in the recorded
    streaming driver.
    """
    recorded = load_file(GOLDEN / "mg_universal_stream_win6.safetensors")
    expected = torch.cat((recorded["keyboard_cond"][0], recorded["mouse_cond"][0]), dim=1)
    held = (["w", "l"], ["a", "i"], [], ["w", "d", "j"])
    ours = torch.cat([rows(index, [entry] * 3) for index, entry in enumerate(held)])
    torch.testing.assert_close(ours, expected)
