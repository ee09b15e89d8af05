# SPDX-License-Identifier: Apache-2.0
"""`WorldEngine`: the interface through which environments generate their chunks.

`OfflineEngine` uses vLLM's `LLM` in this process. `RemoteEngine` (`remote.py`) uses a server.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_omni.actions import ActionEntry, ActionFrame, image_tensor
from vllm_omni.entrypoints.environments.protocol import EnvironmentSpec
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.inputs import DiffusionParams, Output, engine_prompt
from vllm_omni.outputs import RequestFailed, unpack_arrays
from vllm_omni.worlds.start_pose import StartPose

if TYPE_CHECKING:
    from vllm import LLM

Outcome = tuple[dict[str, Any], Mapping[str, np.ndarray]] | RequestFailed
"""A generated chunk's metadata and arrays, or the error if the chunk failed."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """Properties shared by all episodes of a vector environment."""

    num_envs: int
    """Number of environments."""
    size: tuple[int, int]
    """Frame height and width in pixels."""
    image: np.ndarray | None = None
    """Start image, uint8 [H, W, 3], or None if the episodes have no start image."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Additional images by name, each uint8 [H, W, 3]."""
    output: Output = "both"
    """Which arrays each chunk contains: frames (`rgb`), latents, or both."""
    trajectory: bool = False
    """Whether each chunk contains the latents and log-probabilities of its denoise steps."""


@dataclass
class Episode:
    """One environment's history since its last reset, which is sufficient to replay the episode."""

    seed: int
    """The environment session's seed."""
    prompt: str
    """The environment session's prompt."""
    actions: list[ActionFrame] = field(default_factory=list)
    """Action of each step since the reset."""
    start_pose: StartPose | None = None
    """World pose of the start image. None: the caller gave no pose."""

    @property
    def chunks(self) -> int:
        """Number of chunks in the session, including the first chunk, which the reset generated."""
        return 1 + len(self.actions)


class WorldEngine(ABC):
    """Generates the chunks for environments, which are identified by number."""

    spec: EnvironmentSpec
    """The served world's action space, frame sizes and limits."""

    @abstractmethod
    def open(self, settings: WorldSettings) -> None:
        """Create the environments. This method is called once, before any other method."""

    @abstractmethod
    def start(self, which: Sequence[int], episodes: Sequence[Episode]) -> list[Outcome]:
        """Start episodes in the environments `which` and return their first chunks."""

    @abstractmethod
    def advance(
        self, which: Sequence[int], episodes: Sequence[Episode], actions: Sequence[ActionFrame]
    ) -> list[Outcome]:
        """Generate the next chunks of the environments `which`.

        The episodes do not contain the new actions yet. The caller adds the actions afterwards.
        """

    @abstractmethod
    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Replace the environments `targets` with copies of the environment `source`.

        Raises:
            RequestFailed: A copy was refused. The caller must start the targets again.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the environments. Idempotent."""


class OfflineEngine(WorldEngine):
    """Runs environments as sessions of vLLM's offline engine.

    Args:
        llm: The engine.
        owned: Whether `close` stops the engine.
    """

    def __init__(self, llm: "LLM", *, owned: bool = False) -> None:
        config = llm.llm_engine.vllm_config
        self.spec = EnvironmentSpec.of(StreamInfo.from_vllm_config(config, model="world"))
        self._llm, self._owned = llm, owned
        self._sessions: dict[int, str] = {}

    def open(self, settings: WorldSettings) -> None:
        self._settings = settings
        named = {image_tensor(name): array for name, array in settings.images.items()}
        if settings.image is not None:
            named["image"] = settings.image
        # Copy the arrays, because torch does not support read-only arrays.
        self._tensors = {name: torch.from_numpy(np.array(array)) for name, array in named.items()}

    def start(self, which: Sequence[int], episodes: Sequence[Episode]) -> list[Outcome]:
        self._close(which)
        height, width = self._settings.size
        params = []
        for index, episode in zip(which, episodes, strict=True):
            self._sessions[index] = _new_id()
            pose = episode.start_pose
            first = {
                "prompt": episode.prompt,
                "seed": episode.seed,
                "height": height,
                "width": width,
                "options": {} if pose is None else pose.as_option(),
            }
            frames = self.spec.first_chunk_latent_frames
            params.append(self._params(index, 0, [ActionFrame()] * frames, **first))
        return self._run(params, self._tensors)

    def advance(
        self, which: Sequence[int], episodes: Sequence[Episode], actions: Sequence[ActionFrame]
    ) -> list[Outcome]:
        count = self.spec.latent_frames_per_chunk
        return self._run(
            [
                self._params(index, episode.chunks, [action] * count)
                for index, episode, action in zip(which, episodes, actions, strict=True)
            ]
        )

    def fork(self, source: int, targets: Sequence[int]) -> None:
        self._close(targets)
        new = {target: _new_id() for target in targets}
        origin = self._sessions[source]
        self._sessions |= new
        outcomes = self._run(
            [DiffusionParams(session_id=origin, op="fork", fork_to=name) for name in new.values()]
        )
        for outcome in outcomes:
            if isinstance(outcome, RequestFailed):
                self._close(targets)
                raise outcome

    def close(self) -> None:
        self._close(list(self._sessions))
        if self._owned:
            self._llm.llm_engine.engine_core.shutdown()

    def _close(self, which: Sequence[int]) -> None:
        ids = [self._sessions.pop(index) for index in which if index in self._sessions]
        self._encode([DiffusionParams(session_id=session_id, op="close") for session_id in ids])

    def _params(
        self, index: int, chunk: int, actions: list[ActionEntry], **first: Any
    ) -> DiffusionParams:
        return DiffusionParams(
            session_id=self._sessions[index],
            chunk_index=chunk,
            actions=actions if self.spec.actions.has_controls else None,
            output=self._settings.output,
            trajectory=self._settings.trajectory,
            **first,
        )

    def _run(
        self, params: Sequence[DiffusionParams], tensors: dict[str, torch.Tensor] | None = None
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for envelope in self._encode(params, tensors):
            try:
                outcomes.append(unpack_arrays(envelope))
            except RequestFailed as failure:
                outcomes.append(failure)
        return outcomes

    def _encode(
        self, params: Sequence[DiffusionParams], tensors: dict[str, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Send all requests to the engine in a single call and return their result envelopes."""
        if not params:
            return []
        pooling = [each.to_pooling_params(tensors) for each in params]
        prompts = [engine_prompt() for _ in params]
        outputs = self._llm.encode(prompts, pooling, pooling_task="plugin", use_tqdm=False)
        return [output.outputs.data for output in outputs]


def _new_id() -> str:
    return f"env-{secrets.token_hex(16)}"
