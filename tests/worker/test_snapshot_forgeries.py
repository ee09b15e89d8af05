# SPDX-License-Identifier: Apache-2.0
"""A snapshot with a tensor that the model would not produce is refused, and the error names the
tensor.

Each forged file is complete and has a valid header, as if it came from an attacker or from another
version of the model. Other sessions are not affected.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, rewrite, text_chunk, video_chunk, world_chunk
from safetensors import safe_open
from safetensors.torch import load, save_file

from vllm_omni.outputs import RequestFailed

SMALL = {"window_frames": 7, "sink_frames": 2}
CASES: dict[str, tuple[str, dict[str, Any], Callable[..., dict[str, torch.Tensor]], int]] = {
    # family, omni, chunk, chunks
    "world": ("lingbot_world", {"model": SMALL}, world_chunk, 2),
    "world that restarts its decoder": (
        "lingbot_world",
        {"model": {**SMALL, "convention": "pr3701"}},
        world_chunk,
        3,
    ),
    "stream, video in": (
        "causal_wan",
        {"model": {**SMALL, "prompt_switch": "recompute"}},
        video_chunk,
        2,
    ),
    "stream, tiny decoder": ("causal_wan", {"model": {**SMALL, "decoder": "tiny"}}, text_chunk, 2),
    "stream, renewed sinks": (
        "causal_wan",
        {
            "model": {
                "window_frames": 4,
                "sink_frames": 1,
                "latent_frames_per_chunk": 1,
                "sink_refresh_threshold": 0.999,
            }
        },
        functools.partial(text_chunk, output="latents"),
        2,
    ),
    "null world": ("null_world", {}, text_chunk, 2),
}
KINDS = {
    "world": frozenset(
        {"kv.frame", "decoder.conv", "condition.conv", "condition.last", "camera.pose"}
    ),
    "stream, video in": frozenset(
        {"kv.frame", "decoder.conv", "encoder.conv", "video.last_frame", "past.latents"}
    ),
    "stream, renewed sinks": frozenset({"kv.frame", "kv.sink_at"}),
}
"""For some of the cases, the kinds of tensors that the session must contain. Without this check,
the test might not forge them.
"""
DAILY = ("world", "stream, video in")


@dataclass(frozen=True)
class Saved:
    """A live session `a` and its snapshot."""

    worker: Worker
    chunk: Callable[..., dict[str, torch.Tensor]]
    chunks: int
    path: Path
    kinds: frozenset[str]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    def refusal(self, path: Path) -> RequestFailed:
        """Try to restore a file that must be refused, check that no session remains, and return the
        error.
        """
        with pytest.raises(RequestFailed) as failure:
            self.worker.restore("b", path)
        assert list(self.worker.runner.sessions.stats()["chunks"]) == ["a"]
        return failure.value

    def check_continues(self) -> None:
        """Check that the live session generates the same next chunk as a session restored from its
        valid snapshot.
        """
        self.worker.restore("b", self.path)
        ours, theirs = (self.chunk(self.worker, name, self.chunks) for name in "ab")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        self.worker.runner.sessions.close_all()
        self.worker.restore("a", self.path)


@pytest.fixture(
    scope="module",
    params=[
        case if case in DAILY else pytest.param(case, marks=pytest.mark.nightly) for case in CASES
    ],
)
def saved(
    request: pytest.FixtureRequest, make_runner: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Saved]:
    family, omni, chunk, chunks = CASES[request.param]
    worker = Worker(make_runner(request.getfixturevalue(family), omni))
    for index in range(chunks):
        chunk(worker, "a", index)
    path = tmp_path_factory.mktemp("forged") / "a"
    worker.save("a", path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    yield Saved(
        worker,
        chunk,
        chunks,
        path,
        KINDS.get(request.param, frozenset()),
        load(path.read_bytes()),
        metadata,
    )
    worker.runner.sessions.close_all()


def forgeries(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield forgeries of a tensor: tensors with another shape or dtype, or None to remove the
    tensor.
    """
    longer = list(tensor.shape)
    longer[-2 if len(longer) > 1 else -1] += 1
    yield "one element more", torch.zeros(longer, dtype=tensor.dtype)
    yield "flat", tensor.flatten()[:, None]
    yield "one dimension more", tensor[None]
    yield (
        "as many bytes",
        tensor.view(
            {1: torch.int8, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, torch.int16)
        ),
    )
    yield "double", tensor.double() if tensor.dtype != torch.float64 else tensor.float()
    yield "missing", None


def test_forged_tensors_are_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    """A snapshot in which a tensor is missing or has another shape or dtype is refused, and the
    error names the tensor. The live session continues.
    """
    path = tmp_path / "forged"
    kinds = {name.removeprefix("rank0.").rstrip("0123456789") for name in saved.tensors}
    assert kinds >= saved.kinds
    for whole_name, tensor in saved.tensors.items():
        name = whole_name.removeprefix("rank0.")
        for kind, forged in forgeries(name, tensor):
            if forged is not None and (forged.dtype, forged.shape) == (tensor.dtype, tensor.shape):
                continue
            tensors = {**saved.tensors, whole_name: forged}
            save_file(
                {name: tensor for name, tensor in tensors.items() if tensor is not None},
                path,
                saved.metadata,
            )
            failure = saved.refusal(path)
            assert failure.code == "invalid_snapshot", (name, kind, failure)
            assert name in failure.message, (name, kind, failure)
    saved.check_continues()


def test_surplus_tensors_are_refused(saved: Saved, tmp_path: Path) -> None:
    """A snapshot with surplus tensors is refused.

    Examples of surplus tensors are decoder features, caches that the session does not use, and
    frames outside its window.
    """
    path = tmp_path / "forged"
    for name in (
        "decoder.conv99",
        "decoder.tiny.conv00",
        "encoder.conv00",
        "condition.conv99",
        "kv.frame99",
        "past.x",
    ):
        if f"rank0.{name}" not in saved.tensors:
            save_file(
                {**saved.tensors, f"rank0.{name}": torch.zeros(1, 16, 2, 4, 6)},
                path,
                saved.metadata,
            )
            failure = saved.refusal(path)
            assert failure.code == "invalid_snapshot", (name, failure)


@pytest.mark.parametrize("saved", ["stream, video in"], indirect=True)
def test_a_degraded_snapshot_restores_on_a_server_with_the_exact_decoder(
    saved: Saved, tmp_path: Path
) -> None:
    """A session whose last chunk was degraded by `tiny_vae` on another server continues on a server
    that uses the exact decoder.

    The session's snapshot contains the tensors that the exact decoder requires.
    """
    path, cells = tmp_path / "tiny", (1, 16, 3, 4, 6)
    tensors = {name: tensor for name, tensor in saved.tensors.items() if "decoder." not in name}
    tensors["rank0.decoder.tiny.conv00"] = torch.zeros(1, 9, 4, 6)
    assert "lacks the tensor decoder.conv00" in str(refused(saved, tensors, path))
    save_file({**tensors, "rank0.decoder.newest": torch.zeros(cells)}, path, saved.metadata)
    saved.worker.restore("b", path)
    assert len(saved.chunk(saved.worker, "b", saved.chunks)["frames"]) == 12
    saved.worker.runner.sessions.close("b")
    for wrong in (
        torch.zeros(1, 16, 0, 4, 6),
        torch.zeros(1, 16, 3, 4, 7),
        torch.zeros(cells).half(),
        torch.zeros(3),
    ):
        assert "decoder.newest" in str(
            refused(saved, {**tensors, "rank0.decoder.newest": wrong}, path)
        )


def refused(saved: Saved, tensors: dict[str, torch.Tensor], path: Path) -> RequestFailed:
    save_file(tensors, path, saved.metadata)
    return saved.refusal(path)


@pytest.mark.parametrize(
    "case", [{"noise_scale": None}, {"noise_scale": 2.5}, {"noise_scale": -0.5}]
)
@pytest.mark.parametrize("saved", ["stream, video in"], indirect=True)
def test_forged_video_input_is_refused(saved: Saved, tmp_path: Path, case: dict[str, Any]) -> None:
    """A snapshot of a session with video input is refused if its noise scale is not a number within
    the noise controller's range.
    """
    forged_scalars_are_refused(saved, tmp_path, case)


@pytest.mark.parametrize(
    "case",
    [
        {"condition_settled": None},
        {"condition_settled": True},
        {"condition_encoded": 0},
        {"condition_encoded": 1_000},
        {"condition_encoded": "all"},
        {"largest_step": -1.0},
        {"pitch_degrees": 1e999},
        {"seed": -1},
        {"seed": 2**70},
        {"prompt": "x" * 1_000_000},
    ],
)
@pytest.mark.parametrize("saved", ["world"], indirect=True)
def test_forged_conditioning_and_camera_are_refused(
    saved: Saved, tmp_path: Path, case: dict[str, Any]
) -> None:
    """A snapshot is refused if the value of its image conditioning state, camera, seed or prompt is
    one that no session can have, for example an infinite pitch.
    """
    forged_scalars_are_refused(saved, tmp_path, case)


def forged_scalars_are_refused(saved: Saved, tmp_path: Path, scalars: dict[str, Any]) -> None:
    path = tmp_path / "forged"
    path.write_bytes(saved.path.read_bytes())
    rewrite(path, lambda header, tensors: header["ranks"][0]["scalars"].update(scalars))
    assert saved.refusal(path).code == "invalid_snapshot"
