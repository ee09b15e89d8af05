# SPDX-License-Identifier: Apache-2.0
"""`WorldVectorEnv`: worlds of one served model as a gymnasium `VectorEnv`, all stepped by one call to the engine.

    env = WorldVectorEnv.load("my_world", 8, prompt="a village", image=picture)
    frames, infos = env.reset(seed=0)
    frames, rewards, terminations, truncations, infos = env.step(env.action_space.sample())

A step is one chunk: an environment's action holds for all its latent frames. Frames are uint8, latents float32 as the
model made them (`infos["latents"]`). Each environment is a session of the engine: forking copies it, and since noise
depends on (seed, chunk, step) alone, the same seeds and actions give the same bits. Rewards are the caller's
(`reward`), the worlds have none. Only `LLM.encode` of stock vLLM is used. Held by tests/environments/test_world_env.py.
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

from vllm_omni.actions import ActionFrame
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.environments.action_spaces import action_frame, gymnasium_space, idle, with_rest
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.seeds import definite_seed, nth_seed
from vllm_omni.worlds.start_pose import START_POSE, StartPose

if TYPE_CHECKING:
    from vllm import LLM

# N environments, T frames of a chunk, H height, W width

Reward = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(frames [N, T, H, W, 3], latents [N, C, F, h, w]) -> rewards [N]."""


@dataclass
class Episode:
    """One environment since its reset: enough to play it again.

    actions: one of each step. start_pose: where in the world its image was taken; None = it was not given.
    """

    session_id: str
    seed: int
    prompt: str
    actions: list[ActionFrame] = field(default_factory=list)
    start_pose: StartPose | None = None

    @property
    def chunks(self) -> int:
        """Chunks its session has; the first one is the reset's."""
        return 1 + len(self.actions)


class WorldVectorEnv(VectorEnv[np.ndarray, Any, np.ndarray]):
    """See the module docstring.

    observation_space: the chunk's frames [T, H, W, 3]; a reset's first chunk is shorter and is padded in front with its
    first frame. action_space: `gymnasium_space` of what the model states it takes. max_steps: an episode is truncated
    after so many; None = never. An episode that has ended is reset by the next step (`AutoresetMode.NEXT_STEP`).
    A chunk that cannot be made raises `RequestFailed`; that environment needs a reset, the others have moved on.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(
        self,
        llm: "LLM",
        num_envs: int,
        *,
        prompt: str | Sequence[str],
        image: np.ndarray | None = None,
        height: int | None = None,
        width: int | None = None,
        max_steps: int | None = None,
        reward: Reward | None = None,
    ) -> None:
        """prompt: of all environments, or one of each. image: uint8 [H, W, 3], of models that begin with one.

        Raises ValueError for a model that is no world, or that cannot hold so many.
        """
        config = llm.llm_engine.vllm_config
        self.facts = WorldFacts.from_vllm_config(config, model="world")
        self.model_actions = self.facts.actions
        if num_envs > self.facts.max_sessions:
            raise ValueError(
                f"the engine holds {self.facts.max_sessions} sessions, {num_envs} environments were asked for; start "
                "it with additional_config omni.max_sessions"
            )
        self.num_envs = num_envs
        self._llm, self._image, self._reward, self._max_steps = llm, image, reward, max_steps
        self._own_engine = False
        self._prompts = [prompt] * num_envs if isinstance(prompt, str) else list(prompt)
        if len(self._prompts) != num_envs:
            raise ValueError(f"one prompt, or one of each of {num_envs} environments; got {len(self._prompts)}")
        self._size = (height or self.facts.height, width or self.facts.width)
        shape = (self.facts.chunk_frames, *self._size, 3)
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
        cls, model: str | Path, num_envs: int, *, exact: bool = True, omni: dict[str, Any] | None = None, **env: Any
    ) -> "WorldVectorEnv":
        """Start vLLM's offline engine on a checkpoint directory and make environments in it; `close` stops it.

        exact: an environment's bits do not depend on the others beside it; False: one forward for all, faster for small
        models (`omni.batch_invariant`). omni: more of `additional_config["omni"]`. env: of the constructor.
        """
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; unset, a CPU worker wants 92 % of the memory
        from vllm import LLM

        sizes = {name: env[name] for name in ("height", "width") if env.get(name)}
        options = {"max_sessions": 2 * num_envs, "batch_invariant": exact, "max_requests_per_step": num_envs, **sizes}
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
        """Begin every episode anew: its first chunk, idle. seed: of the first environment, the others count on from it.

        options: `reset_mask`, bool [N], those to begin anew; the others stay as they are. `start_pose`, where in the
        world the image was taken: `{x_m, z_m, heading_degrees, pitch_degrees}` of all environments, or a list with one
        of each; it holds until the next call. Raises ValueError for other options.
        """
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)))
        given = _start_poses(options.pop(START_POSE, None), self.num_envs)
        if options:
            raise ValueError(f"unknown options: {', '.join(sorted(options))}; known: reset_mask, {START_POSE}")
        seeds: Sequence[int | None] = [None] * self.num_envs
        if seed is not None:
            seeds = seed if not isinstance(seed, int) else [nth_seed(seed, index) for index in range(self.num_envs)]
        which = np.flatnonzero(mask).tolist()
        for index in which:
            self._starts[index] = given[index]
        self._begin(which, [seeds[index] for index in which], starts=[given[index] for index in which])
        self._ended[which] = False
        return self._frames.copy(), self._infos()

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One chunk of every environment; those whose episode has ended begin anew and ignore their action.

        actions: a kind of controls that is left out (`buttons`, `axes`, `scroll`) is at rest.
        """
        complete = with_rest(self.action_space, actions)
        taken = [action_frame(self.model_actions, action) for action in iterate(self.action_space, complete)]
        begins = np.flatnonzero(self._ended).tolist()
        goes_on = [index for index in range(self.num_envs) if not self._ended[index]]
        self._begin(begins, [None] * len(begins), starts=[self._starts[index] for index in begins])
        self._advance(goes_on, [taken[index] for index in goes_on])
        steps = np.array([0 if episode is None else len(episode.actions) for episode in self.episodes])
        truncations = np.zeros(self.num_envs, bool) if self._max_steps is None else steps >= self._max_steps
        self._ended = truncations.copy()
        infos = self._infos()
        rewards = np.zeros(self.num_envs)
        if self._reward is not None:
            rewards = np.asarray(self._reward(self._frames, infos["latents"]), np.float64)
            rewards[begins] = 0.0
        return self._frames.copy(), rewards, np.zeros(self.num_envs, bool), truncations, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Free the sessions; an engine that `load` started stops, another one stays with its caller."""
        ids = [episode.session_id for episode in self.episodes if episode is not None]
        self._close(ids)
        if self._own_engine:
            self._llm.llm_engine.engine_core.shutdown()
        self.episodes = [None] * self.num_envs

    # -- research ----------------------------------------------------------------------------------

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Make environments `targets` exact copies of `source`; each then goes its own way."""
        origin = self._episode(source)
        targets = [target for target in targets if target != source]
        self._close([old.session_id for target in targets if (old := self.episodes[target]) is not None])
        ids = [_new_id() for _ in targets]
        self._encode([DiffusionParams(session_id=origin.session_id, op="fork", fork_to=new) for new in ids])
        for target, new in zip(targets, ids, strict=True):
            self.episodes[target] = replace(origin, session_id=new, actions=list(origin.actions))
            self._frames[target], self._ended[target] = self._frames[source], self._ended[source]
            self._latents[target] = self._latents[source]
            self._poses[target] = self._poses[source]

    def replay(self, target: int, episode: Episode) -> np.ndarray:
        """Play a recorded episode (`episodes[i]`, or one stored elsewhere) in environment `target`, from its start.

        Returns its frames, uint8 [frames, H, W, 3]: bit for bit those of the first time (`exact`).
        """
        self._begin([target], [episode.seed], [episode.prompt], [episode.start_pose])
        parts = [self._frames[target][-self.facts.first_chunk_frames :].copy()]
        for action in tuple(episode.actions):
            self._advance([target], [action])
            parts.append(self._frames[target].copy())
        return np.concatenate(parts)

    # -- the engine --------------------------------------------------------------------------------

    def _begin(
        self,
        which: list[int],
        seeds: Sequence[int | None],
        prompts: Sequence[str] | None = None,
        starts: Sequence[StartPose | None] | None = None,
    ) -> None:
        """Run the first chunk of new episodes."""
        if not which:
            return
        self._close([old.session_id for index in which if (old := self.episodes[index]) is not None])
        prompts = prompts or [self._prompts[index] for index in which]
        starts = starts or [None] * len(which)
        begun = [
            Episode(_new_id(), definite_seed(seed), prompt, start_pose=start)
            for seed, prompt, start in zip(seeds, prompts, starts, strict=True)
        ]
        height, width = self._size
        latent_frames = self.facts.first_chunk_latent_frames or self.facts.latent_frames_per_chunk
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
            for episode in begun
        ]
        image = {} if self._image is None else {"image": torch.from_numpy(np.array(self._image))}
        for index, episode in zip(which, begun, strict=True):
            self.episodes[index] = episode
        self._run(which, params, image)

    def _advance(self, which: list[int], actions: Sequence[ActionFrame]) -> None:
        """Run the next chunk of episodes."""
        episodes = [self._episode(index) for index in which]
        count = self.facts.latent_frames_per_chunk
        params = [
            self._params(episode, episode.chunks, count, action)
            for episode, action in zip(episodes, actions, strict=True)
        ]
        self._run(which, params)
        for episode, action in zip(episodes, actions, strict=True):
            episode.actions.append(action)

    def _params(
        self, episode: Episode, chunk: int, latent_frames: int, action: ActionFrame | None, **first: Any
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
        self, which: Sequence[int], params: Sequence[DiffusionParams], tensors: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Make one chunk of each environment; those that fail lose their episode, and the first failure is raised."""
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
        """One call to the engine for all requests; returns their envelopes (`outputs.unpack`)."""
        if not params:
            return []
        pooling = [each.to_pooling_params(tensors) for each in params]
        prompts = [engine_prompt() for _ in params]
        outputs = self._llm.encode(prompts, pooling, pooling_task="plugin", use_tqdm=False)
        return [output.outputs.data for output in outputs]

    def _close(self, ids: Sequence[str]) -> None:
        self._encode([DiffusionParams(session_id=session_id, op="close") for session_id in ids])

    def _keep(self, index: int, meta: dict[str, Any], result: dict[str, torch.Tensor]) -> None:
        """Take over a chunk's frames, latents and poses; a first chunk is padded in front with its first frame."""
        frames, latents = result["frames"].numpy(), result["latents"].float().numpy()
        missing = self._frames.shape[1] - len(frames)
        self._frames[index, :missing], self._frames[index, missing:] = frames[0], frames
        missing = self.facts.latent_frames_per_chunk - latents.shape[1]
        self._latents[index] = np.pad(latents, ((0, 0), (max(0, missing), 0), (0, 0), (0, 0)), mode="edge")
        unknown = [[math.nan] * 4] * latents.shape[1]
        poses = np.array(meta.get("world_poses", unknown), np.float64)
        self._poses[index] = np.pad(poses, ((max(0, missing), 0), (0, 0)), mode="edge")

    def _episode(self, index: int) -> Episode:
        episode = self.episodes[index]
        if episode is None:
            raise ValueError(f"environment {index} has no episode; call reset")
        return episode

    def _infos(self) -> dict[str, Any]:
        """latents: float32 [N, C, F, h, w]; seed, chunks: int [N]. world_poses: float64 [N, F, 4], x_m, z_m,
        heading_degrees and pitch_degrees of each latent frame; NaN where they are unknown.
        """
        episodes = [self._episode(index) for index in range(self.num_envs)]
        return {
            "latents": np.stack(self._latents),
            "world_poses": np.stack(self._poses),
            "seed": np.array([episode.seed for episode in episodes]),
            "chunks": np.array([episode.chunks for episode in episodes]),
        }


def _start_poses(given: Any, count: int) -> list[StartPose | None]:
    """Read the option `start_pose`. Raises ValueError."""
    each = [given] * count if given is None or isinstance(given, Mapping) else list(given)
    if len(each) != count:
        raise ValueError(f"{START_POSE}: one, or one of each of {count} environments; got {len(each)}")
    try:
        return [None if start is None else msgspec.convert(start, StartPose) for start in each]
    except msgspec.ValidationError as error:
        raise ValueError(f"{START_POSE}: {error}") from error


def _new_id() -> str:
    return f"env-{secrets.token_hex(16)}"
