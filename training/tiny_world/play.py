# SPDX-License-Identifier: Apache-2.0
"""Generate walks with the model in the real engine: vLLM's `LLM`, one request per chunk.

`Played` describes a walk, and a `World` generates videos of walks, several sessions at a time.
`score.py` can measure any world, and its tests measure one that shows the rendered ground truth.
The model is so small that the host's work per session dominates on a GPU. `SeveralEngines`
therefore distributes walks over several engines with one core each.
"""

import math
import multiprocessing.util
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from training.tiny_world.walks import Walks, key_bits, scripted_walks

LATENTS_A_CHUNK = 3
"""Number of latent frames per chunk in all measures. A chunk has 12 video frames, except for the
first chunk of a walk, which has 9.
"""


@dataclass(frozen=True)
class Played:
    """A walk that a world generates. The start image is the first latent frame, which keys do not
    affect.

    Args:
        start: Start position x, z in metres. None: the pose of the start image is unknown.
        yaw: Heading at the start, in radians.
        keys: Keys held at each latent frame.
        prompts: Prompts, keyed by the latent frame from which each applies. Must contain frame 0.
    """

    start: tuple[float, float] | None
    yaw: float
    keys: tuple[str, ...]
    style: int
    prompts: Mapping[int, str]
    seed: int

    def options(self) -> dict[str, Any]:
        """Return the request options for the first chunk."""
        if self.start is None:
            return {}
        x_m, z_m = self.start
        heading = math.degrees(self.yaw) % 360.0
        return {"start_pose": {"x_m": x_m, "z_m": z_m, "heading_degrees": heading}}

    def walk(self) -> Walks:
        """Return the walk with the positions and angles that result from the keys."""
        assert self.start is not None
        bits = torch.tensor([[key_bits(keys) for keys in self.keys]], dtype=torch.uint8)
        return scripted_walks(torch.tensor([self.start]), torch.tensor([self.yaw]), bits)


class World(Protocol):
    """Interface of a world that generates videos of walks."""

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        """Return a video for each walk, uint8 [4 L - 3, H, W, 3]. `images_NHW3` holds the start
        images, uint8.
        """
        ...


@dataclass
class Times:
    """Times taken to generate chunks (of `LATENTS_A_CHUNK` latent frames)."""

    chunks: float = 0.0
    wall_s: float = 0.0
    stages_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def summary(self) -> dict[str, Any]:
        """Return the elapsed seconds per chunk over all sessions, and the milliseconds that each
        stage takes.
        """
        chunks = max(self.chunks, 1e-9)
        stages = {name: round(value / chunks, 1) for name, value in self.stages_ms.items()}
        return {
            "wall": round(self.wall_s / chunks, 4),
            "stages_ms": stages,
            "chunks": round(self.chunks),
        }

    def add_engine(self, other: "Times") -> None:
        """Add another engine's times. Elapsed seconds are then summed over engines."""
        self.chunks += other.chunks
        self.wall_s += other.wall_s
        for name, value in other.stages_ms.items():
            self.stages_ms[name] += value


class EngineWorld:
    """World that generates videos with the model in vLLM's engine.

    Args:
        omni: Options for `additional_config.omni`, except the size and the number of sessions.
        batch: Number of sessions that run at the same time.
        snapshot_every: Number of model chunks after which a session is saved, closed and restored.
            Default: sessions are never saved.
    """

    def __init__(
        self,
        model: Path,
        size: tuple[int, int],
        *,
        omni: Mapping[str, Any],
        batch: int,
        snapshot_every: int | None = None,
        **engine_args: Any,
    ) -> None:
        self.snapshot_every = snapshot_every
        # Memory for sessions on a CPU, in GiB. By default, vLLM's CPU worker requires 92 % of the
        # memory to be free.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        from vllm import LLM  # imported late, because `--help` should not wait for it

        from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

        height, width = size
        self.batch = batch
        self.times = Times()
        self.llm = LLM(
            model=str(model),
            config_format="omni",
            skip_tokenizer_init=True,
            additional_config={
                "omni": {"height": height, "width": width, "max_sessions": batch, **omni}
            },
            **engine_args,
        )
        transformer = self.llm.llm_engine.vllm_config.model_config.hf_config.lingbot_world[
            "transformer"
        ]
        self.has_poses = transformer.get("control_type") == "world"
        info = StreamInfo.from_vllm_config(self.llm.llm_engine.vllm_config, model=model.name)
        self.later = info.latent_frames_per_chunk
        self.first = info.first_chunk_latent_frames or self.later
        self._sessions = 0

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        videos: dict[int, torch.Tensor] = {}
        by_length = sorted(range(len(walks)), key=lambda index: len(walks[index].keys))
        for group in _runs(by_length, [len(walks[index].keys) for index in by_length], self.batch):
            made = self._together([walks[index] for index in group], images_NHW3[group])
            videos.update(zip(group, made, strict=True))
        return [videos[index] for index in range(len(walks))]

    def close(self) -> None:
        """Stop the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def _together(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        """Generate walks of equal length together, one chunk of each at a time."""
        length = len(walks[0].keys)
        names = [f"walk-{self._sessions + index}" for index in range(len(walks))]
        self._sessions += len(walks)
        parts: list[list[torch.Tensor]] = [[] for _ in walks]
        for number, (begin_at, end) in enumerate(self._chunks(length)):
            if self.snapshot_every and number and number % self.snapshot_every == 0:
                self._save_and_restore(names)
            requests = []
            for name, walk, image in zip(names, walks, images_NHW3, strict=True):
                fields: dict[str, Any] = {
                    "session_id": name,
                    "chunk_index": number,
                    "prompt": walk.prompts.get(begin_at),
                }
                if number == 0:
                    height, width = image.shape[:2]
                    fields |= {"seed": walk.seed, "height": height, "width": width}
                    fields |= {"options": walk.options()} if self.has_poses else {}
                data = {"image": Image.fromarray(image.cpu().numpy())} if number == 0 else {}
                requests.append(
                    (fields | {"actions": [list(keys) for keys in walk.keys[begin_at:end]]}, data)
                )
            started = time.perf_counter()
            responses = self._send(requests)
            self.times.wall_s += time.perf_counter() - started
            if 10 * end // length > 10 * begin_at // length:
                print(
                    f"{len(walks)} walks: {end} of {length} latent frames, "
                    f"{self.times.wall_s:.0f} s",
                    file=sys.stderr,
                )
            for made, (meta, tensors) in zip(parts, responses, strict=True):
                made.append(tensors["frames"].clone())
                self.times.chunks += (end - begin_at) / LATENTS_A_CHUNK
                for name, spans in meta["timings_ms"].items():
                    self.times.stages_ms[name] += sum(spans)
        self._send([({"session_id": name, "op": "close"}, {}) for name in names])
        return [torch.cat(made) for made in parts]

    def _save_and_restore(self, names: Sequence[str]) -> None:
        from vllm_omni.session_files.snapshot_exchange import (
            package_version,
            restore_exchange,
            run_exchange,
            save_exchange,
        )

        request = self.llm.collective_rpc
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                path = Path(folder) / f"{name}.safetensors"
                run_exchange(save_exchange(name, path, package_version()), request)
                self._send([({"session_id": name, "op": "close"}, {})])
                run_exchange(restore_exchange(name, path), request)

    def _chunks(self, length: int) -> Iterator[tuple[int, int]]:
        begin_at, end = 0, self.first
        while end <= length:
            yield begin_at, end
            begin_at, end = end, end + self.later
        if begin_at != length:
            raise ValueError(
                f"chunks of {self.first}, then {self.later} latent frames do not fill a walk of "
                f"{length}"
            )

    def _send(
        self, requests: Sequence[tuple[dict[str, Any], dict[str, Any]]]
    ) -> list[tuple[dict[str, Any], Any]]:
        from vllm_omni.inputs import DiffusionParams
        from vllm_omni.outputs import unpack

        prompts: Any = [
            {"prompt_token_ids": [0], **({"multi_modal_data": data} if data else {})}
            for _, data in requests
        ]
        params = [DiffusionParams(**fields).to_pooling_params() for fields, _ in requests]
        outputs = self.llm.encode(prompts, params, pooling_task="plugin", use_tqdm=False)
        return [unpack(output.outputs.data) for output in outputs]


class SeveralEngines:
    """World that distributes walks over several `EngineWorld`s with the same arguments, in separate
    processes.
    """

    def __init__(self, engines: int, model: Path, size: tuple[int, int], **options: Any) -> None:
        self.engines = engines
        self.times = Times()
        self._pool = ProcessPoolExecutor(
            engines,
            multiprocessing.get_context("spawn"),
            _Worker.start_worker,
            (model, size, options),
        )

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        shares = [
            range(first, len(walks), self.engines) for first in range(min(self.engines, len(walks)))
        ]
        tasks = [
            self._pool.submit(
                _Worker.play, [walks[index] for index in share], images_NHW3[list(share)].numpy()
            )
            for share in shares
        ]
        videos: dict[int, torch.Tensor] = {}
        for share, task in zip(shares, tasks, strict=True):
            made, times = task.result()
            videos.update(zip(share, (torch.from_numpy(video) for video in made), strict=True))
            self.times.add_engine(times)
        return [videos[index] for index in range(len(walks))]

    def close(self) -> None:
        """Stop the processes."""
        self._pool.shutdown()


class _Worker:
    """State of one process of `SeveralEngines`, which runs one engine."""

    world: EngineWorld

    @classmethod
    def start_worker(cls, model: Path, size: tuple[int, int], options: Mapping[str, Any]) -> None:
        cls.world = EngineWorld(model, size, **options)
        # The engine must be closed before this process waits for its children, which include the
        # engine's process.
        multiprocessing.util.Finalize(None, cls.world.close, exitpriority=100)

    @classmethod
    def play(cls, walks: Sequence[Played], images_NHW3: Any) -> tuple[list[Any], Times]:
        """Generate walks in this process. Images and videos are NumPy arrays, because torch tensors
        would be sent through shared memory.
        """
        cls.world.times = Times()
        videos = cls.world.play(walks, torch.from_numpy(images_NHW3))
        return [video.numpy() for video in videos], cls.world.times


def _runs(order: Sequence[int], keys: Sequence[int], longest: int) -> Iterator[list[int]]:
    """Split `order` into runs of equal keys with at most `longest` entries each."""
    run: list[int] = []
    for index, item in enumerate(order):
        if run and (keys[index] != keys[index - 1] or len(run) == longest):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
