# SPDX-License-Identifier: Apache-2.0
"""`WorldVectorEnv`: sessions of a world model as a gymnasium `VectorEnv`. `WorldEnv`: one session
as a gymnasium `Env`.

    env = WorldVectorEnv.load("my_world", 8, prompt="a village", image=image)
    env = WorldVectorEnv.connect("http://gpu:8000", 8, prompt="a village", image=image)
    observations, infos = env.reset(seed=0)
    observations, rewards, terminations, truncations, infos = env.step(env.action_space.sample())

The engine is either vLLM's offline engine in this process (`load`) or a server (`connect`). All
environments are stepped in a single engine call, which batches them. A step generates one chunk, so
an environment's action applies to all of the chunk's latent frames. Frames are uint8; latents are
float32 and unmodified. Forking an environment copies its session. Noise depends only on (seed,
chunk, step), so equal seeds and actions produce bit-identical results, both in this process and on
a server. Worlds define no rewards; the caller may provide a reward function (`reward`).
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from vllm_omni.actions import ActionFrame
from vllm_omni.environments.action_spaces import action_frame, gymnasium_space, with_rest
from vllm_omni.environments.engine import (
    Episode,
    OfflineEngine,
    Outcome,
    WorldEngine,
    WorldSettings,
)
from vllm_omni.environments.remote import RemoteEngine
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import definite_seed, nth_seed
from vllm_omni.worlds.start_pose import START_POSE, StartPose

if TYPE_CHECKING:
    from vllm import LLM

# N environments, T frames of a chunk, H height, W width, S denoise steps

Reward = Callable[[np.ndarray, dict[str, Any]], np.ndarray]
"""Function that takes observations [N, ...] and infos and returns rewards [N]."""
Observation = Literal["frames", "latents"]


class WorldVectorEnv(VectorEnv[np.ndarray, Any, np.ndarray]):
    """Vector environment whose environments are sessions of a world model.

    The next step resets an episode that has ended (`AutoresetMode.NEXT_STEP`). If an environment's
    chunk fails, the step raises `RequestFailed`. The failed environment must be reset; all other
    environments have advanced.

    Attributes:
        observation_space: A chunk's frames [T, H, W, 3], or its latents [C, F, h, w]. The first
            chunk after a reset is shorter and is padded at the front with its first frame.
        action_space: `gymnasium_space` of the model's controls.
        episodes: Each environment's history.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - gymnasium's own attribute
    """Environment metadata in gymnasium's format."""

    def __init__(
        self,
        engine: "WorldEngine | LLM",
        num_envs: int,
        *,
        prompt: str | Sequence[str] = "",
        image: np.ndarray | None = None,
        images: Mapping[str, np.ndarray] | None = None,
        height: int | None = None,
        width: int | None = None,
        observation: Observation = "frames",
        latents: bool = True,
        trajectory: bool = False,
        max_steps: int | None = None,
        reward: Reward | None = None,
    ) -> None:
        """Create environments in an engine.

        Args:
            engine: Engine that generates the chunks.
            num_envs: Number of environments.
            prompt: One prompt for all environments, or a list with one prompt per environment.
            image: Start image, uint8 [H, W, 3], for models that require one.
            images: Named images for each episode (`ActionSpace.images`), each uint8 [H, W, 3].
            height: Frame height in pixels. Default: the model's default height.
            width: Frame width in pixels. Default: the model's default width.
            observation: What an observation contains: decoded `frames`, or `latents`.
            latents: Whether `infos["latents"]` contains the latents in addition to frames.
            trajectory: Whether the infos contain the latents and log-probabilities of the denoise
                steps. Requires a model with a stochastic sampler.
            max_steps: Number of steps after which an episode is truncated. Default: episodes are
                never truncated.
            reward: Function that computes rewards. Default: all rewards are 0.

        Raises:
            ValueError: The model is not a world model, or the engine supports too few sessions.
        """
        self._engine = engine if isinstance(engine, WorldEngine) else OfflineEngine(engine)
        self.info = self._engine.spec
        self.model_actions = self.info.actions
        if num_envs > self.info.max_sessions:
            raise ValueError(
                f"the engine has at most {self.info.max_sessions} sessions, but {num_envs} "
                "environments were requested; start it with additional_config omni.max_sessions"
            )
        self.num_envs = num_envs
        self._reward, self._max_steps = reward, max_steps
        self._prompts = [prompt] * num_envs if isinstance(prompt, str) else list(prompt)
        if len(self._prompts) != num_envs:
            raise ValueError(
                f"prompt must be one, or one per environment ({num_envs}); got {len(self._prompts)}"
            )
        height, width = height or self.info.height, width or self.info.width
        frames = spaces.Box(0, 255, (self.info.chunk_frames, height, width, 3), np.uint8)
        shape = self.info.latent_shape(height, width)
        self._observed = observation
        self.single_observation_space: spaces.Space[Any] = (
            frames if observation == "frames" else spaces.Box(-np.inf, np.inf, shape, np.float32)
        )
        self.single_action_space: spaces.Space[Any] = gymnasium_space(self.model_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.episodes: list[Episode | None] = [None] * num_envs
        self._ended = np.zeros(num_envs, bool)
        self._arrays: list[dict[str, np.ndarray]] = [{}] * num_envs
        self._starts: list[StartPose | None] = [None] * num_envs
        self._engine.open(
            WorldSettings(
                num_envs=num_envs,
                size=(height, width),
                image=image,
                images=images or {},
                output="latents" if observation == "latents" else "both" if latents else "rgb",
                trajectory=trajectory,
            )
        )

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
        """Start vLLM's offline engine with a checkpoint and create environments in it.

        `close` stops the engine.

        Args:
            model: Checkpoint directory.
            num_envs: Number of environments.
            exact: Whether an environment's results are bit-identical regardless of the other
                environments (`omni.batch_invariant`). If false, all environments share a single
                forward pass, which is faster for small models.
            omni: Additional options for `additional_config["omni"]`.
            **env: Additional arguments for `WorldVectorEnv`'s constructor.
        """
        # The value is in GiB. Without it, a CPU worker requires 92 % of the memory.
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
        return cls(OfflineEngine(llm, owned=True), num_envs, **env)

    @classmethod
    def connect(
        cls,
        url: str,
        num_envs: int,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        **env: Any,
    ) -> "WorldVectorEnv":
        """Create environments on a server (`vllm serve --omni`). No model is needed on this
        machine.

        Args:
            url: Server address, for example `http://127.0.0.1:8000`.
            num_envs: Number of environments.
            api_key: The server's API key, or None if the server needs no key.
            timeout_s: Maximum time in seconds to wait for a step.
            **env: Additional arguments for `WorldVectorEnv`'s constructor.

        Raises:
            RequestFailed: The server refused the API key or the request to create environments.
            OSError: The server does not respond.
        """
        return cls(RemoteEngine(url, api_key=api_key, timeout_s=timeout_s), num_envs, **env)

    # -- gymnasium ---------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new episodes, and generate their first chunks without actions.

        Args:
            seed: Seed of the first environment, or a list with one seed per environment. A single
                seed is incremented by one for each additional environment.
            options: `reset_mask`, bool [N], selects the environments to reset. `start_pose` is the
                world pose of the start image, `{x_m, z_m, heading_degrees, pitch_degrees}`, or a
                list with one pose per environment. A start pose applies until `reset` is called
                again.

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
        self._start(which, [seeds[index] for index in which])
        self._ended[which] = False
        return self._observations(), self._infos()

    def step(
        self, actions: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Generate one chunk for every environment.

        If an environment's episode has ended, the step starts a new episode and ignores the action.

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
        self._start(starts, [None] * len(starts))
        self._advance(continuing, [taken[index] for index in continuing])
        steps = np.array(
            [0 if episode is None else len(episode.actions) for episode in self.episodes]
        )
        truncations = (
            np.zeros(self.num_envs, bool) if self._max_steps is None else steps >= self._max_steps
        )
        self._ended = truncations.copy()
        observations, infos = self._observations(), self._infos()
        rewards = np.zeros(self.num_envs)
        if self._reward is not None:
            rewards = np.array(self._reward(observations, infos), np.float64)
            rewards[starts] = 0.0
        return observations, rewards, np.zeros(self.num_envs, bool), truncations, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Free the sessions, and stop the engine if `load` started it."""
        self._engine.close()
        self.episodes = [None] * self.num_envs

    # -- research ----------------------------------------------------------------------------------

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Replace environments with exact copies of another environment. The copies can then be
        stepped independently.

        Args:
            source: Environment to copy.
            targets: Environments to replace. If a copy is refused, they must be reset.

        Raises:
            ValueError: The source has no episode, or a target is not an environment's number or
                occurs twice.
            RequestFailed: The engine or the server refused a copy.
        """
        origin = self._episode(source)
        targets = [target for target in targets if target != source]
        if len(set(targets)) < len(targets) or not set(targets) <= set(range(self.num_envs)):
            raise ValueError(
                f"targets must be different numbers from 0 to {self.num_envs - 1}, got {targets}"
            )
        if targets:
            for target in targets:
                self.episodes[target] = None
            self._engine.fork(source, targets)
        for target in targets:
            self.episodes[target] = replace(origin, actions=list(origin.actions))
            self._ended[target] = self._ended[source]
            self._arrays[target] = self._arrays[source]

    def replay(self, target: int, episode: Episode) -> np.ndarray:
        """Replay an episode from its start. The episode can be one of `episodes` or a stored one.

        Args:
            target: Environment in which to replay the episode.
            episode: Episode to replay.

        Returns:
            The episode's frames, uint8 [frames, H, W, 3]. If `exact` is set, the frames are
            bit-identical to the original frames. If observations are latents, the result is the
            latents [steps, C, F, h, w].
        """
        self._begin([target], [replace(episode, actions=[])])
        frames = self._observed == "frames"
        first = self._arrays[target][self._observed]
        parts = [first[-self.info.first_chunk_frames :] if frames else first[None]]
        for action in tuple(episode.actions):
            self._advance([target], [action])
            chunk = self._arrays[target][self._observed]
            parts.append(chunk if frames else chunk[None])
        return np.concatenate(parts)

    # -- the engine --------------------------------------------------------------------------------

    def _start(self, which: list[int], seeds: Sequence[int | None]) -> None:
        """Start new episodes in the environments `which`."""
        episodes = [
            Episode(definite_seed(seed), self._prompts[index], start_pose=self._starts[index])
            for index, seed in zip(which, seeds, strict=True)
        ]
        self._begin(which, episodes)

    def _begin(self, which: list[int], episodes: Sequence[Episode]) -> None:
        """Generate the first chunks of episodes."""
        for index, episode in zip(which, episodes, strict=True):
            self.episodes[index] = episode
        if which:
            self._keep(which, self._engine.start(which, episodes))

    def _advance(self, which: list[int], actions: Sequence[ActionFrame]) -> None:
        """Generate the next chunks of the environments `which`."""
        if not which:
            return
        episodes = [self._episode(index) for index in which]
        outcomes = self._engine.advance(which, episodes, actions)
        for episode, action in zip(episodes, actions, strict=True):
            episode.actions.append(action)
        self._keep(which, outcomes)

    def _keep(self, which: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Store the arrays of generated chunks. First chunks are padded at the front.

        If an environment's chunk has failed, the environment's episode is discarded. The first
        failure is raised after all chunks have been stored.
        """
        failures: list[RequestFailed] = []
        for index, outcome in zip(which, outcomes, strict=True):
            if isinstance(outcome, RequestFailed):
                self.episodes[index] = None
                failures.append(outcome)
                continue
            meta, arrays = outcome
            count = self.info.latent_frames_per_chunk
            unknown = [[math.nan] * 4] * count
            poses = np.array(meta.get("world_poses", unknown), np.float64)
            kept = {"world_poses": _padded(poses, count, 0)}
            if (frames := arrays.get("frames")) is not None:
                kept["frames"] = _padded(frames, self.info.chunk_frames, 0)
            if (latents := arrays.get("latents")) is not None:
                kept["latents"] = _padded(latents.astype(np.float32), count, 1)
            if (steps := arrays.get("step_latents")) is not None:
                kept["step_latents"] = _padded(steps, count, 2)
                kept["step_log_probs"] = arrays["step_log_probs"]
            self._arrays[index] = kept
        if failures:
            raise failures[0]

    def _episode(self, index: int) -> Episode:
        episode = self.episodes[index]
        if episode is None:
            raise ValueError(f"environment {index} has no episode; call reset")
        return episode

    def _observations(self) -> np.ndarray:
        """Return all environments' observations in a single array, which the caller owns."""
        for index in range(self.num_envs):
            self._episode(index)
        return np.stack([arrays[self._observed] for arrays in self._arrays])

    def _infos(self) -> dict[str, Any]:
        """Return all environments' infos.

        Returns:
            `latents`, float32 [N, C, F, h, w]; `seed` and `chunks`, int [N]; `world_poses`, float64
            [N, F, 4]: x_m, z_m, heading_degrees and pitch_degrees of each latent frame, NaN if
            unknown. If `trajectory` is set, the result contains two additional arrays.
            `step_latents`, float32 [N, S, C, F, h, w], contains the latents before each denoise
            step. `step_log_probs`, float64 [N, S - 1], contains the log-probability of the latents
            after each step but the last.
        """
        episodes = [self._episode(index) for index in range(self.num_envs)]
        kinds = [name for name in self._arrays[0] if name not in ("frames", self._observed)]
        return {
            **{name: np.stack([arrays[name] for arrays in self._arrays]) for name in kinds},
            "seed": np.array([episode.seed for episode in episodes]),
            "chunks": np.array([episode.chunks for episode in episodes]),
        }


class WorldEnv(gymnasium.Env[np.ndarray, Any]):
    """One world as a gymnasium `Env`.

    Args:
        worlds: A vector environment with one environment.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium's own attribute
    """Environment metadata in gymnasium's format."""

    def __init__(self, worlds: WorldVectorEnv) -> None:
        if worlds.num_envs != 1:
            raise ValueError(f"an Env has one environment, got {worlds.num_envs}")
        self.worlds = worlds
        self.observation_space = worlds.single_observation_space
        self.action_space = worlds.single_action_space

    @classmethod
    def connect(cls, url: str, **options: Any) -> "WorldEnv":
        """Create an environment on a server. The arguments are the same as for
        `WorldVectorEnv.connect`.
        """
        return cls(WorldVectorEnv.connect(url, 1, **options))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a new episode. See `WorldVectorEnv.reset` for the arguments."""
        super().reset(seed=seed)
        observations, infos = self.worlds.reset(seed=seed, options=options)
        return observations[0], _of_first(infos)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Generate one chunk. See `WorldVectorEnv.step` for the arguments and the result."""
        batched = (
            {name: np.asarray(value)[None] for name, value in action.items()}
            if isinstance(action, Mapping)
            else np.asarray(action)[None]
        )
        observations, rewards, terminations, truncations, infos = self.worlds.step(batched)
        ended = bool(terminations[0]), bool(truncations[0])
        return observations[0], float(rewards[0]), *ended, _of_first(infos)

    def close(self) -> None:
        """Free the session."""
        self.worlds.close()


def _of_first(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first environment's infos. The world poses are omitted if any of them is
    unknown.
    """
    first = {name: value[0] for name, value in infos.items()}
    if np.isnan(first["world_poses"]).any():
        del first["world_poses"]  # because gymnasium compares infos, and NaN is not equal to itself
    return first


def _padded(array: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Pad an axis at the front to a given length by repeating its first entry."""
    missing = max(0, length - array.shape[axis])
    if not missing:
        return array
    pads = [(0, 0)] * array.ndim
    pads[axis] = (missing, 0)
    return np.pad(array, pads, mode="edge")


def _start_poses(given: Any, count: int) -> list[StartPose | None]:
    """Parse the `start_pose` option.

    Raises:
        ValueError: The option is invalid.
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
