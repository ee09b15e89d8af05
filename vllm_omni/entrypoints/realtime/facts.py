# SPDX-License-Identifier: Apache-2.0
"""`WorldFacts`: properties of the served model that doors need, so that no door names a model.

A family states its differences from the defaults (`ModelFamily.world_facts`); sizes and session limits come from
`OmniConfig`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace
from vllm_omni.config import DEFAULT_HEIGHT, DEFAULT_WIDTH, OmniConfig, parse_options
from vllm_omni.entrypoints.ranks import num_ranks
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.worlds.card import CONFIG_KEY, WorldCard

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class WorldFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Controls, geometry and rates of a causal world model.

    actions: the controls that it takes, whether it has prompts and start images.
    patch_size, vae_stride: (time, height, width).
    first_stride: pixel frames of a session's first latent frame.
    latent_frames_per_chunk: latent frames that are denoised together; first_chunk_latent_frames: in a session's first
    chunk, None = as many. intrinsics_reference_size: (width, height) for which intrinsics are given. key_focal: focal
    length that goes with keys, in pixels of the video, unless the world's description has its own. key_step: length of
    a step of a movement key, in units of poses. fps: the rate the model was trained at.
    """

    actions: ActionSpace = CAMERA_SPACE
    patch_size: tuple[int, int, int] = (1, 2, 2)
    vae_stride: tuple[int, int, int] = (4, 8, 8)
    first_stride: int = 1
    latent_frames_per_chunk: int = 3
    first_chunk_latent_frames: int | None = None
    fps: float = 16.0
    intrinsics_reference_size: tuple[int, int] = (832, 480)
    key_focal: float = 500.0
    key_step: float = 0.05

    height: int = DEFAULT_HEIGHT
    width: int = DEFAULT_WIDTH
    max_sessions: int = 8
    session_idle_s: float = 300.0
    by_deadline: bool = False
    """Whether the engine wants to know when a chunk is due (`omni.scheduling`)."""
    window_frames: int | None = None
    """Latent frames that a chunk sees, where a session may choose fewer; None = it may not."""
    sink_frames: int | None = None
    chunks_in_flight: int = 1
    """Chunks of a session that the engine works on at once (`OmniConfig`)."""
    target_fps: float | None = None
    """Frame rate of a stream whose client names none; None = the model's rate."""
    model: str = ""
    card: WorldCard | None = None
    """The checkpoint's world card, if it has one."""

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig", model: str) -> "WorldFacts":
        """Read the model's own facts and the deployment's. `model`: the name clients know it by."""
        hf_config: dict[str, Any] = vllm_config.model_config.hf_config.to_dict()
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        family = get_family(hf_config["omni_family"])
        facts = {
            **(family.world_facts(hf_config, omni) if family.world_facts is not None else {}),
            "actions": ActionSpace() if family.action_space is None else family.action_space(hf_config, omni),
            "height": omni.height,
            "width": omni.width,
            "max_sessions": omni.max_sessions * num_ranks(vllm_config),
            "session_idle_s": omni.session_idle_s,
            "by_deadline": omni.scheduling == "deadline",
            "chunks_in_flight": omni.chunks_in_flight,
            "target_fps": omni.target_fps,
            "model": model,
            "card": hf_config.get(CONFIG_KEY),
        }
        return parse_options(cls, facts, f"world facts of {family.name}")

    @property
    def needs_image(self) -> bool:
        """Whether a session must begin with a start image."""
        return self.actions.image == "required"

    def check_prompt(self, prompt: str | None) -> None:
        """Raise `DoorError("invalid_prompt")` for a text that a model without prompts cannot use."""
        if prompt and self.actions.prompt == "none":
            raise DoorError(
                "invalid_prompt", f"this model takes no prompt; it takes {self.actions.takes()}", param="prompt"
            )

    def check_image(self, has_image: bool, param: str) -> None:
        """Raise `DoorError` if a world cannot begin with, or without, a start image. param: its key in the message."""
        if has_image and self.actions.image == "none":
            raise DoorError(
                "invalid_image", f"this model takes no start image; it takes {self.actions.takes()}", param=param
            )
        if not has_image and self.needs_image:
            raise DoorError("missing_image", f"this model begins with an image; send {param}", param=param)

    @property
    def max_area(self) -> int:
        return self.height * self.width

    @property
    def size_multiple(self) -> tuple[int, int]:
        """(width, height) must be multiples of this, in pixels."""
        return self.patch_size[2] * self.vae_stride[2], self.patch_size[1] * self.vae_stride[1]

    @property
    def first_chunk_frames(self) -> int:
        """Pixel frames of a session's first chunk."""
        return self.pixel_frames(self.first_chunk_latent_frames or self.latent_frames_per_chunk, starts_world=True)

    @property
    def chunk_frames(self) -> int:
        """Pixel frames of every later chunk."""
        return self.vae_stride[0] * self.latent_frames_per_chunk

    def key_intrinsics(self, width: int, height: int) -> list[float]:
        """fx, fy, cx, cy of the view that goes with keys, for poses of a video of `width` x `height`.

        In pixels of the reference size, as poses' intrinsics are given.
        """
        wide, high = self.intrinsics_reference_size
        focal = self.focal_of_keys(width)
        return [focal * wide / width, focal * high / height, wide / 2, high / 2]

    def focal_of_keys(self, width: int) -> float:
        """Focal length that goes with keys in a video of `width`, in its pixels."""
        own = None if self.card is None else self.card.focal
        return self.key_focal if own is None else own * width

    def pixel_frames(self, latent_frames: int, starts_world: bool) -> int:
        """Pixel frames of so many latent frames, a session's first or later ones."""
        less = self.vae_stride[0] - self.first_stride if starts_world else 0
        return max(0, self.vae_stride[0] * latent_frames - less)

    def latent_frames(self, pixel_frames: int) -> int:
        """Latent frames of a chunk of `pixel_frames`, a session's first or a later one."""
        return -(-pixel_frames // self.vae_stride[0])

    def chunk_sizes(self, first: bool) -> Iterator[int]:
        """Endless sizes of the coming chunks in pixel frames; `first`: the session has not begun."""
        if first:
            yield self.first_chunk_frames
        while True:
            yield self.chunk_frames

    def split(self, num_frames: int, first: bool) -> tuple[list[int], int]:
        """Cut `num_frames` into whole chunks: `(sizes, frames left over)`."""
        sizes: list[int] = []
        for size in self.chunk_sizes(first):
            if size > num_frames:
                return sizes, num_frames
            sizes.append(size)
            num_frames -= size
        raise AssertionError("unreachable: chunk_sizes is endless")

    def check_size(self, height: int, width: int) -> None:
        """Raise `DoorError("unsupported_size")` unless the model can make frames of this size."""
        wide, high = self.size_multiple
        if width % wide or height % high or height * width > self.max_area:
            raise DoorError(
                "unsupported_size",
                f"{width}x{height} arrived; width must be a multiple of {wide}, height of {high}, and "
                f"width x height at most {self.max_area}",
                param="extra_body",
            )
