# SPDX-License-Identifier: Apache-2.0
"""Capabilities of a served model, declared by its family.

`Capabilities` lists the requests that the model accepts over HTTP. The endpoints check requests
against it before they call the engine, so that no endpoint depends on a model. Chunk sizes and the
camera of world models are in `entrypoints/realtime/connection/stream_info.py`. `Refusals` lists the
server options that the model does not support; `check_refusals` rejects them at start.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from vllm_omni.config import OmniConfig

Task = Literal[
    "text_to_image", "image_edit", "text_to_video", "image_to_video", "video_edit", "world"
]

Positive = Annotated[int, msgspec.Meta(ge=1)]


class ImageSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Image sizes of a model whose images and videos have different sizes."""

    width: Positive
    """Width in pixels if the client requests no size."""
    height: Positive
    """Height in pixels if the client requests no size."""
    max_pixels: Positive
    """Maximum of `width * height`."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tasks, sizes and defaults of a served model."""

    tasks: tuple[Task, ...] = ("world", "image_to_video")
    """Tasks that clients may request. With `world`, the model generates chunk after chunk in a
    session that outlives a request. `/v1/videos` requires `text_to_video` or `image_to_video`; a
    model with only `image_to_video` requires a start image. `video_edit` generates a video with the
    size and length of the input video."""
    width: Positive | None = None
    """Width in pixels if the client requests no size. Default: `OmniConfig.width`."""
    height: Positive | None = None
    """Height in pixels if the client requests no size. Default: `OmniConfig.height`."""
    max_pixels: Positive | None = None
    """Maximum of `width * height`. Default: `OmniConfig.max_area`."""
    max_side: Positive = 8192
    """Maximum width and maximum height in pixels."""
    pictures: ImageSizes | None = None
    """Sizes of images. Default: the sizes of videos."""
    size_multiple: tuple[Positive, Positive] = (16, 16)
    """Divisors in pixels of the width and the height."""
    num_inference_steps: Positive | None = None
    """Default number of denoise steps. None: clients cannot choose the number."""
    max_num_inference_steps: Positive = 200
    """Maximum number of denoise steps."""
    guidance_scale: float | None = None
    """Default scale of classifier-free guidance. None: clients cannot choose the scale."""
    true_cfg_scale: bool = False
    """Whether requests may set `true_cfg_scale`."""
    negative_prompt: bool = False
    """Whether requests may have a negative prompt."""
    num_frames: Positive = 81
    """Number of frames of a video if the client requests no length."""
    max_num_frames: Positive = 9 + 12 * 40
    """Maximum number of frames of a video."""
    frame_stride: Positive = 1
    """Frames per latent frame: a one-shot video has `1 + frame_stride * k` frames. The video of a
    world model may end after any frame."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 16.0
    """Frame rate of a video if the client requests none, in frames per second."""
    images_per_request: Positive = 1
    """Maximum number of images of one engine request. A call for more becomes several requests."""
    input_images: Positive = 1
    """Maximum number of input images of an edit."""
    mask: bool = False
    """Whether an edit may have a mask."""
    reads: tuple[Literal["image", "video"], ...] = ()
    """Inputs of understanding requests (`/v1/chat/completions`)."""
    read_frames: Positive = 72
    """Maximum number of frames of an input video, for understanding and for edits."""

    @property
    def is_world(self) -> bool:
        return "world" in self.tasks

    @property
    def makes_images(self) -> bool:
        return "text_to_image" in self.tasks

    @property
    def edits_images(self) -> bool:
        return "image_edit" in self.tasks

    @property
    def makes_videos(self) -> bool:
        return "text_to_video" in self.tasks or "image_to_video" in self.tasks

    def nearest_num_frames(self, num_frames: int) -> int:
        """Return the allowed number of frames closest to `num_frames`, or the smaller one if two
        are equally close.
        """
        if self.is_world:
            return min(max(1, num_frames), self.max_num_frames)
        most = (self.max_num_frames - 1) // self.frame_stride
        steps = -(-(2 * (num_frames - 1) - self.frame_stride) // (2 * self.frame_stride))
        return 1 + self.frame_stride * min(max(0, steps), most)


@dataclass(frozen=True)
class Refusal:
    """Why a model does not support an option."""

    reason: str
    """Reason for the refusal, which follows "because" in the error."""
    remedy: str = "remove the option"
    """Advice at the end of the error."""


SINGLE_QUALITY = Refusal("it has a single quality")
NEEDS_PREVIOUS_CHUNK = Refusal("its next chunk needs the previous one complete")
SESSIONS_END_WITH_REQUEST = Refusal("it has no sessions that outlive a request")


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """Server options that a model does not support. None means that the option is supported.

    The defaults are those of a model that implements only `SupportsStepExecution`.
    """

    pipeline_stages: Refusal | None = None
    """`--pipeline-parallel-size` above 1."""
    vae_stage: Refusal | None = Refusal("its decoder cannot be a pipeline stage of its own")
    """`omni.vae_stage`. Support requires `SupportsVAEStage`."""
    vae_parallel: Refusal | None = Refusal("its decode cannot be split over ranks")
    """`omni.vae_parallel`. Support requires `SupportsParallelDecode`."""
    chunks_in_flight: Refusal | None = NEEDS_PREVIOUS_CHUNK
    """`omni.chunks_in_flight` above 1. Support requires `SupportsChunksInFlight`."""
    temporal_pipeline: Refusal | None = NEEDS_PREVIOUS_CHUNK
    """`omni.pipeline` `temporal`. Support requires `SupportsChunksInFlight`."""
    fewer_steps: Refusal | None = SINGLE_QUALITY
    """`fewer_steps` in `omni.degradations`."""
    tiny_vae: Refusal | None = SINGLE_QUALITY
    """`tiny_vae` in `omni.degradations`."""
    periodic_snapshots: Refusal | None = None
    """`omni.snapshot_period_s`."""
    kv_growth: Refusal | None = Refusal("its sessions cannot have windows of different lengths")
    """`omni.kv_growth`. Support requires `SupportsSessionWindows`."""


def check_refusals(model: str, refusals: Refusals, omni: OmniConfig, stages: int) -> None:
    """Check that the model supports the options of the server.

    Args:
        model: Name of the model that users know.
        refusals: Declaration of the family.
        omni: Options of the server.
        stages: `--pipeline-parallel-size`.

    Raises:
        ValueError: An option is not supported. The message contains the option, the reason and
            advice.
    """
    degradations = {"fewer_steps": refusals.fewer_steps, "tiny_vae": refusals.tiny_vae}
    requested = [
        (stages > 1, f"--pipeline-parallel-size {stages}", refusals.pipeline_stages),
        (omni.vae_stage, "omni.vae_stage true", refusals.vae_stage),
        (omni.vae_parallel, "omni.vae_parallel true", refusals.vae_parallel),
        (
            omni.chunks_in_flight > 1,
            f"omni.chunks_in_flight {omni.chunks_in_flight}",
            refusals.chunks_in_flight,
        ),
        (omni.pipeline == "temporal", "omni.pipeline 'temporal'", refusals.temporal_pipeline),
        *((True, f"omni.degradations {name!r}", degradations[name]) for name in omni.degradations),
        (
            omni.snapshot_period_s is not None,
            f"omni.snapshot_period_s {omni.snapshot_period_s}",
            refusals.periodic_snapshots,
        ),
        (omni.kv_growth, "omni.kv_growth true", refusals.kv_growth),
    ]
    for is_requested, option, refusal in requested:
        if is_requested and refusal is not None:
            raise ValueError(
                f"{option}: {model} does not support it, because {refusal.reason}; {refusal.remedy}"
            )
