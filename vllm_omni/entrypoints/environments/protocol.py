# SPDX-License-Identifier: Apache-2.0
"""Messages of `/v1/environments`, for the server and for `vllm_omni.environments`.

Requests are JSON. A reply with chunks is one result envelope (`vllm_omni/outputs.py`): its metadata
is a `ChunksReply`, and its tensors are named `KIND.ENVIRONMENT`, for example `frames.0`, so that
the server copies each array once and the client none. This module imports neither vLLM nor
gymnasium.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from vllm_omni.actions import ActionFrame, ActionSpace, Name, NamedSources
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.inputs import Output, Pixels, Text
from vllm_omni.seeds import RequestedSeed, check_seed
from vllm_omni.worlds.start_pose import StartPose

PATH: Final = "/v1/environments"
VERSION: Final = 1
MAX_ENVIRONMENTS: Final = 256
"""Maximum number of environments that one request names."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ENVIRONMENTS)]
Indices = Annotated[list[Index], msgspec.Meta(min_length=1, max_length=MAX_ENVIRONMENTS)]
Kind = Literal["frames", "latents", "step_latents", "step_log_probs"]
KINDS: Final[tuple[Kind, ...]] = ("frames", "latents", "step_latents", "step_log_probs")
"""Kinds of arrays of a chunk."""


class EnvironmentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Spaces and limits of a served world, from which a client builds gymnasium spaces."""

    version: int = VERSION
    """Version of the protocol."""
    model: str
    """Name of the model."""
    actions: ActionSpace
    """Controls of the model, and whether it has prompts and start images."""
    height: int
    """Default height of the frames in pixels."""
    width: int
    """Default width of the frames in pixels."""
    first_chunk_frames: int
    """Frames of the chunk that a reset generates."""
    chunk_frames: int
    """Frames of the chunk that a step generates."""
    first_chunk_latent_frames: int
    """Latent frames of the chunk that a reset generates."""
    latent_frames_per_chunk: int
    """Latent frames of the chunk that a step generates."""
    latent_channels: int
    """Channels of a latent frame."""
    latent_stride: tuple[int, int]
    """Height and width in pixels of one latent position."""
    latent_size: tuple[int, int] | None
    """Height and width of a latent frame, if they do not depend on the size of the frames."""
    max_sessions: int
    """Maximum number of environments of all clients together."""
    idle_s: float
    """Seconds without a request after which the server closes an environment."""

    @classmethod
    def of(cls, info: StreamInfo) -> "EnvironmentSpec":
        """Return the description of a served model."""
        return cls(
            model=info.model,
            actions=info.actions,
            height=info.height,
            width=info.width,
            first_chunk_frames=info.first_chunk_frames,
            chunk_frames=info.chunk_frames,
            first_chunk_latent_frames=info.first_chunk_latent_frames
            or info.latent_frames_per_chunk,
            latent_frames_per_chunk=info.latent_frames_per_chunk,
            latent_channels=info.latent_channels,
            latent_stride=info.vae_stride[1:],
            latent_size=info.latent_size,
            max_sessions=info.max_sessions,
            idle_s=info.session_idle_s,
        )

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the shape of a step's latents, [C, F, h, w], for frames of a size in pixels."""
        down, across = self.latent_stride
        size = self.latent_size or (height // down, width // across)
        return (self.latent_channels, self.latent_frames_per_chunk, *size)


class CreateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/environments`."""

    num_envs: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENVIRONMENTS)]
    """Number of environments."""
    height: Pixels | None = None
    """Height of the frames in pixels. Default: the server's."""
    width: Pixels | None = None
    """Width of the frames in pixels. Default: the server's."""
    image: str | None = None
    """Start image of every episode as a `data:` URL. It is not resized."""
    images: NamedSources = {}
    """Named images of every episode as `data:` URLs."""
    output: Output = "rgb"
    """What replies contain: `rgb` frames, `latents`, which are then not decoded, or `both`."""
    trajectory: bool = False
    """Whether replies contain the latents and log-probabilities of each denoise step."""


class CreateReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of `POST /v1/environments`."""

    id: str
    """Id of the environments, for the paths of further requests."""
    num_envs: int
    """Number of environments."""
    spec: EnvironmentSpec
    """Spaces and limits."""
    object: Literal["environments"] = "environments"
    """Type of the object."""


class ResetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new episode of one environment."""

    environment: Index
    """Number of the environment."""
    seed: RequestedSeed = -1
    """Seed of the noise. Default: drawn."""
    prompt: Text = ""
    """Prompt of the episode."""
    start_pose: StartPose | None = None
    """World pose of the start image. Default: unknown, or that of a start image of the world."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


class ResetRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/environments/{id}/reset`."""

    episodes: Annotated[list[ResetEntry], msgspec.Meta(min_length=1, max_length=MAX_ENVIRONMENTS)]
    """Episodes to start. Other environments continue."""


class StepEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of one environment."""

    environment: Index
    """Number of the environment."""
    chunk_index: Annotated[int, msgspec.Meta(ge=1)]
    """Number of the chunk in its episode. A repeated step is refused with `out_of_order`, so it
    never advances an environment twice."""
    action: ActionFrame = ActionFrame()
    """Controls, held for the whole chunk."""


class StepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/environments/{id}/step`."""

    steps: Annotated[list[StepEntry], msgspec.Meta(min_length=1, max_length=MAX_ENVIRONMENTS)]
    """Environments to step. Others rest."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/environments/{id}/fork`."""

    source: Index
    """Environment to copy."""
    targets: Indices
    """Environments that become copies."""


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one environment in a `ChunksReply`."""

    environment: int
    """Number of the environment."""
    chunk_index: int | None = None
    """Number of the chunk in its episode. None: it failed."""
    world_poses: list[list[float]] | None = None
    """x_m, z_m, heading_degrees and pitch_degrees of each latent frame. None: unknown."""
    error: dict[Name, Any] | None = None
    """`code` and `message` of a failure. The environment then needs a reset."""


class ChunksReply(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of the reply of a reset or a step."""

    chunks: list[ChunkEntry]
    """Results in the order of the request."""
