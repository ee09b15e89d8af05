# SPDX-License-Identifier: Apache-2.0
"""`WorldVectorEnv`: sessions of a world model as a gymnasium `VectorEnv`.

    env = WorldVectorEnv.load("my_world", 8, prompt="a village", image=image) frames, infos =
    env.reset(seed=0) frames, rewards, terminations, truncations, infos =
    env.step(env.action_space.sample())

All environments are stepped by one call to the engine. A step is one chunk: the action of an
environment applies to all its latent frames. Frames are uint8; latents are float32 and unmodified
(`infos["latents"]`). Each environment is a session of the engine. Forking an environment copies its
session. Noise depends only on (seed, chunk, step), so equal seeds and actions give bit-identical
results. Worlds have no rewards; the caller may provide a function (`reward`). Only stock vLLM's
`LLM.encode` is used.
"""

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from vllm_omni.actions import ActionFrame, image_tensor
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.environments.action_spaces import action_frame, gymnasium_space, idle, with_rest
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.seeds import definite_seed, nth_seed
from vllm_omni.worlds.start_pose import START_POSE, StartPose

if TYPE_CHECKING:
    from vllm import LLM

# N environments, T frames of a chunk, H height, W width

Reward = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function of frames [N, T, H, W, 3] and latents [N, C, F, h, w] that returns rewards [N]."""


@dataclass
class Episode:
    """History of one environment since its reset, sufficient to replay it."""

    session_id: str
    """Session of the environment."""
    seed: int
    """Seed of the session."""
    prompt: str
    """Prompt of the session."""
    actions: list[ActionFrame] = field(default_factory=list)
    """Action of each step."""
    start_pose: StartPose | None = None
    """World pose of the start image, if it was given."""

    @property
    def chunks(self) -> int:
        """Number of chunks of the session, including the first one, which the reset generated."""
        return 1 + len(self.actions)


class WorldVectorEnv(VectorEnv[np.ndarray, Any, np.ndarray]):
    """Vector environment of world model sessions.

    An episode that has ended is reset by the next step (`AutoresetMode.NEXT_STEP`). A chunk that
    fails raises `RequestFailed`; its environment needs a reset, and all others have advanced.

    Attributes:
        observation_space: Frames of a chunk [T, H, W, 3]. The first chunk after a reset is shorter
            and padded at the front with its first frame.
        action_space: `gymnasium_space` of the model's controls.
        episodes: History of each environment.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - gymnasium's own attribute
    """Gymnasium's description of the environment."""

    def __init__(
        self,
        llm: "LLM",
        num_envs: int,
        *,
        prompt: str | Sequence[str],
        image: np.ndarray | None = None,
        images: Mapping[str, np.ndarray] | None = None,
        height: int | None = None,
        width: int | None = None,
        max_steps: int | None = None,
        reward: Reward | None = None,
    ) -> None:
        """Create environments in an engine.

        Args:
            llm: The engine.
            num_envs: Number of environments.
            prompt: Prompt of all environments, or one per environment.
            image: Start image, uint8 [H, W, 3], for models that need one.
            images: Named images of each episode (`ActionSpace.images`), in the same form.
            height: Height in pixels. Default: the model's.
            width: Width in pixels. Default: the model's.
            max_steps: Steps after which an episode is truncated. Default: never.
            reward: Function that computes rewards. Default: all are 0.

        Raises:
            ValueError: The model is not a world, or the engine has too few sessions.
        """
        config = llm.llm_engine.vllm_config
        self.info = StreamInfo.from_vllm_config(config, model="world")
        self.model_actions = self.info.actions
        if num_envs > self.info.max_sessions:
            raise ValueError(
                f"the engine has at most {self.info.max_sessions} sessions, but {num_envs} "
                "environments were requested; start it with additional_config omni.max_sessions"
            )
        self.num_envs = num_envs
        self._images = {image_tensor(name): array for name, array in (images or {}).items()}
        if image is not None:
            self._images["image"] = image
        self._llm, self._reward, self._max_steps = llm, reward, max_steps
        self._own_engine = False
        self._prompts = [prompt] * num_envs if isinstance(prompt, str) else list(prompt)
        if len(self._prompts) != num_envs:
            raise ValueError(
                f"prompt must be one, or one per environment ({num_envs}); got {len(self._prompts)}"
            )
        self._size = (height or self.info.height, width or self.info.width)
        shape = (self.info.chunk_frames, *self._size, 3)
        self.single_observation_space: spaces.Space[Any] = spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space: spaces.Space[Any] = gymnasium_space(self.model_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.episodes: list[Episode | None] = [None] * num_envs
        self._ended = np.zeros(num_envs, bool)
        self._frames = np.zeros((num_envs, *shape), np.uint8)
        self._latents: list[np.ndarray] = [np.zeros(0, np.float32)] * num_envs
        self._poses: list[np.ndarray] = [np.zeros((0, 4))] * num_envs
        self._starts: list[StartPose | None] = [None] * num_envs

    @classmethod
    def load(
        cls,
        model: str | Path,
        num_envs: int,
        *,
        exact: bool = True,
        omni: dict[str, Any] | None = None,
        **env: Any,
    ) -> "WorldVectorEnv":
        """Start vLLM's offline engine on a checkpoint and create environments in it.

        `close` stops the engine.

        Args:
            model: Checkpoint directory.
            num_envs: Number of environments.
            exact: Whether the results of an environment are bit-identical regardless of the others.
                If false, all share one forward pass, which is faster for small models
                (`omni.batch_invariant`).
            omni: Further options of `additional_config["omni"]`. **env: Arguments of the
            constructor.
        """

        # In GiB. By default a CPU worker requires 92 % of the memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        from vllm import LLM

        sizes = {name: env[name] for name in ("height", "width") if env.get(name)}
        options = {
            "max_sessions": 2 * num_envs,
            "batch_invariant": exact,
            "max_requests_per_step": num_envs,
            **sizes,
        }
        llm = LLM(
            model=str(model),
            config_format="omni",
            skip_tokenizer_init=True,
            max_num_seqs=num_envs,
            additional_config={"omni": {**options, **(omni or {})}},
        )
        made = cls(llm, num_envs, **env)
        made._own_engine = True
        return made

    # -- gymnasium ---------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new episodes and generate their first chunk without any action.

        Args:
            seed: Seed of the first environment, counted up for the others, or one seed each.
            options: `reset_mask`, bool [N], selects the environments to reset. `start_pose` is the
                world pose of the start image, `{x_m, z_m, heading_degrees, pitch_degrees}`, or a
                list with one per environment; it applies until the next call.

        Raises:
            ValueError: An option is unknown or invalid.
        """
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)))
        given = _start_poses(options.pop(START_POSE, None), self.num_envs)
        if options:
            raise ValueError(
                f"unknown options: {', '.join(sorted(options))}; known: reset_mask, {START_POSE}"
            )
        seeds: Sequence[int | None] = [None] * self.num_envs
        if seed is not None:
            seeds = (
                seed
                if not isinstance(seed, int)
                else [nth_seed(seed, index) for index in range(self.num_envs)]
            )
        which = np.flatnonzero(mask).tolist()
        for index in which:
            self._starts[index] = given[index]
        self._start(
            which, [seeds[index] for index in which], starts=[given[index] for index in which]
        )
        self._ended[which] = False
        return self._frames.copy(), self._infos()

    def step(
        self, actions: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Generate one chunk of every environment.

        If the episode of an environment has ended, the step starts a new one and ignores the
        action.

        Args:
            actions: Batch of actions. Omitted controls (`buttons`, `axes`, `scroll`) are neutral.
        """
        complete = with_rest(self.action_space, actions)
        taken = [
            action_frame(self.model_actions, action)
            for action in iterate(self.action_space, complete)
        ]
        starts = np.flatnonzero(self._ended).tolist()
        continuing = [index for index in range(self.num_envs) if not self._ended[index]]
        self._start(starts, [None] * len(starts), starts=[self._starts[index] for index in starts])
        self._advance(continuing, [taken[index] for index in continuing])
        steps = np.array(
            [0 if episode is None else len(episode.actions) for episode in self.episodes]
        )
        truncations = (
            np.zeros(self.num_envs, bool) if self._max_steps is None else steps >= self._max_steps
        )
        self._ended = truncations.copy()
        infos = self._infos()
        rewards = np.zeros(self.num_envs)
        if self._reward is not None:
            rewards = np.asarray(self._reward(self._frames, infos["latents"]), np.float64)
            rewards[starts] = 0.0
        return self._frames.copy(), rewards, np.zeros(self.num_envs, bool), truncations, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Free the sessions, and stop the engine if `load` started it."""
        ids = [episode.session_id for episode in self.episodes if episode is not None]
        self._close(ids)
        if self._own_engine:
            self._llm.llm_engine.engine_core.shutdown()
        self.episodes = [None] * self.num_envs

    # -- research ----------------------------------------------------------------------------------

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Make environments exact copies of another one. Afterwards they are independent.

        Args:
            source: Environment to copy.
            targets: Environments to replace.
        """
        origin = self._episode(source)
        targets = [target for target in targets if target != source]
        self._close(
            [old.session_id for target in targets if (old := self.episodes[target]) is not None]
        )
        ids = [_new_id() for _ in targets]
        self._encode(
            [DiffusionParams(session_id=origin.session_id, op="fork", fork_to=new) for new in ids]
        )
        for target, new in zip(targets, ids, strict=True):
            self.episodes[target] = replace(origin, session_id=new, actions=list(origin.actions))
            self._frames[target], self._ended[target] = self._frames[source], self._ended[source]
            self._latents[target] = self._latents[source]
            self._poses[target] = self._poses[source]

    def replay(self, target: int, episode: Episode) -> np.ndarray:
        """Replay an episode (`episodes[i]` or a stored one) from its start.

        Args:
            target: Environment to use.
            episode: The episode.

        Returns:
            Its frames, uint8 [frames, H, W, 3], bit-identical to the original ones (with `exact`).
        """
        self._start([target], [episode.seed], [episode.prompt], [episode.start_pose])
        parts = [self._frames[target][-self.info.first_chunk_frames :].copy()]
        for action in tuple(episode.actions):
            self._advance([target], [action])
            parts.append(self._frames[target].copy())
        return np.concatenate(parts)

    # -- the engine --------------------------------------------------------------------------------

    def _start(
        self,
        which: list[int],
        seeds: Sequence[int | None],
        prompts: Sequence[str] | None = None,
        starts: Sequence[StartPose | None] | None = None,
    ) -> None:
        """Run the first chunk of new episodes."""
        if not which:
            return
        self._close(
            [old.session_id for index in which if (old := self.episodes[index]) is not None]
        )
        prompts = prompts or [self._prompts[index] for index in which]
        starts = starts or [None] * len(which)
        started = [
            Episode(_new_id(), definite_seed(seed), prompt, start_pose=start)
            for seed, prompt, start in zip(seeds, prompts, starts, strict=True)
        ]
        height, width = self._size
        latent_frames = self.info.first_chunk_latent_frames or self.info.latent_frames_per_chunk
        params = [
            self._params(
                episode,
                0,
                latent_frames,
                None,
                prompt=episode.prompt,
                seed=episode.seed,
                height=height,
                width=width,
                options={} if episode.start_pose is None else episode.start_pose.as_option(),
            )
            for episode in started
        ]
        images = {name: torch.from_numpy(np.array(x)) for name, x in self._images.items()}
        for index, episode in zip(which, started, strict=True):
            self.episodes[index] = episode
        self._run(which, params, images)

    def _advance(self, which: list[int], actions: Sequence[ActionFrame]) -> None:
        """Run the next chunk of episodes."""
        episodes = [self._episode(index) for index in which]
        count = self.info.latent_frames_per_chunk
        params = [
            self._params(episode, episode.chunks, count, action)
            for episode, action in zip(episodes, actions, strict=True)
        ]
        self._run(which, params)
        for episode, action in zip(episodes, actions, strict=True):
            episode.actions.append(action)

    def _params(
        self,
        episode: Episode,
        chunk: int,
        latent_frames: int,
        action: ActionFrame | None,
        **first: Any,
    ) -> DiffusionParams:
        held = idle(self.model_actions) if action is None else action
        return DiffusionParams(
            session_id=episode.session_id,
            chunk_index=chunk,
            actions=[held] * latent_frames if self.model_actions.has_controls else None,
            output="both",
            **first,
        )

    def _run(
        self,
        which: Sequence[int],
        params: Sequence[DiffusionParams],
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Generate one chunk of each environment.

        A failed environment loses its episode. The first failure is raised.
        """
        failures: list[RequestFailed] = []
        for index, envelope in zip(which, self._encode(params, tensors), strict=True):
            try:
                self._keep(index, *unpack(envelope))
            except RequestFailed as failure:
                self.episodes[index] = None
                failures.append(failure)
        if failures:
            raise failures[0]

    def _encode(
        self, params: Sequence[DiffusionParams], tensors: dict[str, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Send all requests to the engine in one call and return their envelopes."""
        if not params:
            return []
        pooling = [each.to_pooling_params(tensors) for each in params]
        prompts = [engine_prompt() for _ in params]
        outputs = self._llm.encode(prompts, pooling, pooling_task="plugin", use_tqdm=False)
        return [output.outputs.data for output in outputs]

    def _close(self, ids: Sequence[str]) -> None:
        self._encode([DiffusionParams(session_id=session_id, op="close") for session_id in ids])

    def _keep(self, index: int, meta: dict[str, Any], result: dict[str, torch.Tensor]) -> None:
        """Store a chunk's frames, latents and poses. A first chunk is padded at the front."""
        frames, latents = result["frames"].numpy(), result["latents"].float().numpy()
        missing = self._frames.shape[1] - len(frames)
        self._frames[index, :missing], self._frames[index, missing:] = frames[0], frames
        missing = self.info.latent_frames_per_chunk - latents.shape[1]
        self._latents[index] = np.pad(
            latents, ((0, 0), (max(0, missing), 0), (0, 0), (0, 0)), mode="edge"
        )
        unknown = [[math.nan] * 4] * latents.shape[1]
        poses = np.array(meta.get("world_poses", unknown), np.float64)
        self._poses[index] = np.pad(poses, ((max(0, missing), 0), (0, 0)), mode="edge")

    def _episode(self, index: int) -> Episode:
        episode = self.episodes[index]
        if episode is None:
            raise ValueError(f"environment {index} has no episode; call reset")
        return episode

    def _infos(self) -> dict[str, Any]:
        """Return the infos of all environments.

        Returns:
            `latents`, float32 [N, C, F, h, w]; `seed` and `chunks`, int [N]; `world_poses`, float64
            [N, F, 4]: x_m, z_m, heading_degrees and pitch_degrees of each latent frame, NaN if
            unknown.
        """
        episodes = [self._episode(index) for index in range(self.num_envs)]
        return {
            "latents": np.stack(self._latents),
            "world_poses": np.stack(self._poses),
            "seed": np.array([episode.seed for episode in episodes]),
            "chunks": np.array([episode.chunks for episode in episodes]),
        }


def _start_poses(given: Any, count: int) -> list[StartPose | None]:
    """Parse the option `start_pose`.

    Raises:
        ValueError: It is invalid.
    """
    each = [given] * count if given is None or isinstance(given, Mapping) else list(given)
    if len(each) != count:
        raise ValueError(
            f"{START_POSE} must be one, or one per environment ({count}); got {len(each)}"
        )
    try:
        return [None if start is None else msgspec.convert(start, StartPose) for start in each]
    except msgspec.ValidationError as error:
        raise ValueError(f"{START_POSE}: {error}") from error


def _new_id() -> str:
    return f"env-{secrets.token_hex(16)}"
