# SPDX-License-Identifier: Apache-2.0
"""Saves and restores sessions of runners in this process, as if through `collective_rpc`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.scheduling import new_request, run_to_end
from safetensors import safe_open
from safetensors.torch import load, save_file

from vllm_omni.actions import ActionFrame
from vllm_omni.session_files.snapshot import SnapshotHeader
from vllm_omni.session_files.snapshot_exchange import (
    copy_exchange,
    live_save_exchange,
    restore_exchange,
    run_exchange,
    save_exchange,
    update_exchange,
)
from vllm_omni.worker.diffusion.sessions.background_snapshots import BackgroundSnapshots
from vllm_omni.worker.diffusion.sessions.live_copies import LiveCopies
from vllm_omni.worker.diffusion.sessions.snapshots import SessionSnapshots


class Worker:
    """A runner with the worker's snapshot file RPCs. `rpc` returns results in the same form as
    `LLM.collective_rpc`.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.snapshots = SessionSnapshots(runner)
        self.background = BackgroundSnapshots(self.snapshots, runner.device)
        self.copies = LiveCopies(self.snapshots, runner.device)

    def rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        calls = {
            "describe_session": self.snapshots.describe,
            "write_session": self.snapshots.write,
            "stage_snapshot": self.background.stage,
            "write_snapshot": self.background.write,
            "snapshot_written": self.background.written,
            "describe_copy": self.copies.describe,
            "write_copy": self.copies.write,
            "copy_written": self.copies.written,
            "end_copy": self.copies.end,
            "restore_session": self.snapshots.restore,
            "update_session": self.snapshots.update,
            "close_session": self.runner.sessions.close,
        }
        with torch.inference_mode():
            return [calls[method](*args)]

    def save(
        self, session_id: str, path: Path, owner: dict[str, str] | None = None
    ) -> SnapshotHeader:
        return run_exchange(save_exchange(session_id, path, "0.test", owner), self.rpc)

    def save_live(self, session_id: str, path: Path) -> tuple[SnapshotHeader, float]:
        return run_exchange(live_save_exchange(session_id, path, "0.test"), self.rpc)

    def copy(self, session_id: str, path: Path, *, is_playing: bool) -> tuple[SnapshotHeader, int]:
        exchange = copy_exchange(session_id, path, "0.test", is_playing=is_playing)
        return run_exchange(exchange, self.rpc)

    def update(self, session_id: str, path: Path) -> SnapshotHeader:
        return run_exchange(update_exchange(session_id, path), self.rpc)[0]

    def restore(self, session_id: str, path: Path) -> SnapshotHeader:
        return run_exchange(restore_exchange(session_id, path), self.rpc)[0]

    def chunk(
        self, session_id: str, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> dict[str, torch.Tensor]:
        """Run the session's next chunk and return copies of its result tensors."""
        result = run_to_end(
            self.runner, new_request("r", tensors, session_id=session_id, **fields)
        )["r"]
        if isinstance(result, Exception):
            raise result
        return {name: tensor.clone() for name, tensor in result[1].items()}

    def bits(self, session_id: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return all of the session's state that can influence later chunks."""
        session = self.runner.sessions.get(session_id)
        tensors = {
            name: tensor.contiguous().view(torch.uint8)
            for name, tensor in session.tensors().items()
        }
        return session.scalars(), {
            name: tensor.cpu().numpy().tobytes() for name, tensor in tensors.items()
        }


def world_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    keys = [["w"], ["w", "j"], ["i"]]
    image = (
        {"image": torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)}
        if index == 0
        else None
    )
    first = {"prompt": "a harbour", "seed": 3} if index == 0 else {}
    return worker.chunk(session_id, image, **{"actions": keys, **first, **fields})


def placed_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    """Run a chunk of a world that has poses. The first chunk sets the start pose."""
    start = {"x_m": 1.0, "z_m": 1.0, "heading_degrees": 10.0}
    options = {"options": {"start_pose": start}} if index == 0 else {}
    return world_chunk(worker, session_id, index, **options, **fields)


def resting_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    """Run a chunk of a world that has poses, with no key held."""
    return placed_chunk(worker, session_id, index, **{"actions": [[]] * 3, **fields})


def game_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    """Run a chunk of a game model. Game models accept no prompt, so if a test passes a prompt,
    another key is pressed instead.
    """
    keys = [["s"] if fields.pop("prompt", None) else ["w"], ["w", "l"], ["i"]]
    image = (
        {"image": torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)}
        if index == 0
        else None
    )
    return worker.chunk(session_id, image, actions=keys, **fields)


def referenced_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    """Run a chunk of a session with reference images of 32 x 64 pixels."""
    image = torch.arange(32 * 64 * 3, dtype=torch.uint8).view(32, 64, 3)
    tensors = {"image": image, "images.head": image.flip(0), "images.back": image.flip(1)}
    if index == 0:
        fields |= {"height": 32, "width": 64}
    return worker.chunk(
        session_id, tensors if index == 0 else None, actions=[["w"], ["w", "l"], ["i"]], **fields
    )


def frame_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    """Like `game_chunk`, but for a model whose chunks have only one latent frame."""
    keys = [["s"] if fields.pop("prompt", None) else ["w"]]
    image = (
        {"image": torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)}
        if index == 0
        else None
    )
    return worker.chunk(session_id, image, actions=keys, **fields)


PLAY = {
    "buttons": [{"name": "run", "title": "run"}, {"name": "jump", "title": "jump"}],
    "axes": [{"name": "dx", "title": "turn", "unit": "pixels", "kind": "motion"}],
    "scroll": True,
    "prompt": "optional",
    "image": "none",
}
"""Action space that tests configure for the null world."""


def played_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    actions = [["run"], ActionFrame(("jump",), {"dx": 0.1 * (index + 1)}), ActionFrame(scroll=-1.0)]
    first = {"seed": 4} if index == 0 else {}
    return worker.chunk(session_id, actions=actions, **{**first, **fields})


def text_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    first = {"prompt": "a beach", "seed": 4} if index == 0 else {}
    return worker.chunk(session_id, **{**first, **fields})


def video_chunk(
    worker: Worker, session_id: str, index: int, **fields: Any
) -> dict[str, torch.Tensor]:
    count = 9 if index == 0 else 12
    ramp = torch.arange(count).view(-1, 1, 1, 1) * (3 + index)
    video = (
        (torch.arange(48).view(1, 1, -1, 1) * 4 + ramp)
        .expand(-1, 32, -1, 3)
        .to(torch.uint8)
        .contiguous()
    )
    first = {"prompt": "a beach", "seed": 4, "options": {"source": "video"}} if index == 0 else {}
    return worker.chunk(session_id, {"video": video}, **{**first, **fields})


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Change a snapshot's header or tensors, and write the file with the safetensors library."""
    tensors = load(path.read_bytes())
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    header = json.loads(metadata["omni_session"])
    change(header, tensors)
    save_file(tensors, path, {**metadata, "omni_session": json.dumps(header)})
