# SPDX-License-Identifier: Apache-2.0
"""`Capabilities`: requests that a served model takes over HTTP, stated by its family, so that no
door names a model.

Doors consult only this (and `StreamInfo` for worlds); other requests are refused before the engine
is touched. Geometry of worlds (chunk sizes, camera) is
`entrypoints/realtime/connection/stream_info.py`'s. Held by tests/entrypoints/openai/test_plan.py.
"""

from typing import Annotated, Literal

import msgspec

Task = Literal[
    "text_to_image", "image_edit", "text_to_video", "image_to_video", "video_edit", "world"
]

Positive = Annotated[int, msgspec.Meta(ge=1)]


class ImageSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """width, height: pixels of a picture when the client names no size. max_pixels: largest
    width x height.
    """

    width: Positive
    height: Positive
    max_pixels: Positive


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tasks, sizes and defaults of one served model.

    tasks: `world` = chunk after chunk in a session that stays; without it a request is one-shot.
    `/v1/videos` need `text_to_video` or `image_to_video`: the latter accepts a start image, which
    is required without the former. `video_edit` makes a new video from one that is sent; its size
    and length follow that one.
    width, height: pixels when the client names no size; None = the deployment's (`OmniConfig`).
    max_pixels: largest width x height; None = the deployment's. max_side: of either side.
    size_multiple: (width, height) must be multiples of it. pictures: sizes of pictures, where a
    model that also makes videos has others for them.
    num_inference_steps, guidance_scale: the model's defaults; None = fixed in the model, a client
    cannot choose.
    true_cfg_scale: whether the model has an option of that name. negative_prompt: whether the model
    uses one.
    num_frames, fps: of a video when the client names none. frame_stride: a one-shot video has
    `1 + frame_stride * k` frames; a world may be cut after any frame.
    images_per_request: pictures the model makes in one engine request; a call that wants more
    becomes several.
    input_images: pictures an edit may be given. mask: whether an edit honours one.
    reads: inputs that the model answers questions about (`/v1/chat/completions`). read_frames: the
    most frames of a clip that is read or edited.
    """

    tasks: tuple[Task, ...] = ("world", "image_to_video")
    width: Positive | None = None
    height: Positive | None = None
    max_pixels: Positive | None = None
    max_side: Positive = 8192
    pictures: ImageSizes | None = None
    size_multiple: tuple[Positive, Positive] = (16, 16)
    num_inference_steps: Positive | None = None
    max_num_inference_steps: Positive = 200
    guidance_scale: float | None = None
    true_cfg_scale: bool = False
    negative_prompt: bool = False
    num_frames: Positive = 81
    max_num_frames: Positive = 9 + 12 * 40
    frame_stride: Positive = 1
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 16.0
    images_per_request: Positive = 1
    input_images: Positive = 1
    mask: bool = False
    reads: tuple[Literal["image", "video"], ...] = ()
    read_frames: Positive = 72

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
        """The allowed count of frames nearest to `num_frames` (the smaller of two), at most
        `max_num_frames`.
        """
        if self.is_world:
            return min(max(1, num_frames), self.max_num_frames)
        most = (self.max_num_frames - 1) // self.frame_stride
        steps = -(-(2 * (num_frames - 1) - self.frame_stride) // (2 * self.frame_stride))
        return 1 + self.frame_stride * min(max(0, steps), most)
