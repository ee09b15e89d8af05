# SPDX-License-Identifier: Apache-2.0
"""`StreamInfo`: stream metadata of the served model, which makes endpoints independent of the
model.

In `ModelFamily.stream_info`, a model family sets the values that differ from the defaults. Frame
sizes and session limits come from `OmniConfig`.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace
from vllm_omni.config import DEFAULT_HEIGHT, DEFAULT_WIDTH, OmniConfig, parse_options
from vllm_omni.entrypoints.engine.session_placement import num_data_parallel_ranks
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.worlds.description import CONFIG_KEY, WorldDescription
from vllm_omni.worlds.movement import PITCH_LIMIT_DEGREES

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Controls, geometry and rates of a causal world model."""

    actions: ActionSpace = CAMERA_SPACE
    """The model's controls, and whether it accepts prompts and start images."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    """Transformer patch size: (time, height, width)."""
    vae_stride: tuple[int, int, int] = (4, 8, 8)
    """VAE downsampling factors: (time, height, width)."""
    latent_channels: int = 16
    """Number of channels in a latent frame. Default: 16."""
    latent_size: tuple[int, int] | None = None
    """Height and width of a latent frame, if they do not depend on the frame size. Default: the
    frame size divided by `vae_stride`.
    """
    first_stride: int = 1
    """Number of pixel frames in a session's first latent frame. Default: 1."""
    latent_frames_per_chunk: int = 3
    """Number of latent frames denoised together as a chunk. Default: 3."""
    first_chunk_latent_frames: int | None = None
    """Number of latent frames in a session's first chunk. Default: `latent_frames_per_chunk`."""
    fps: float = 16.0
    """Frame rate at which the model was trained. Default: 16."""
    intrinsics_reference_size: tuple[int, int] = (832, 480)
    """(width, height) in pixels of the image that intrinsics refer to."""
    key_focal: float = 500.0
    """Focal length in video pixels, assumed for camera keys if the world description does not
    specify one.
    """
    key_step: float = 0.05
    """Distance in pose units that the camera moves in one step of a movement key. Default: 0.05."""

    height: int = DEFAULT_HEIGHT
    """Default frame height in pixels."""
    width: int = DEFAULT_WIDTH
    """Default frame width in pixels."""
    max_sessions: int = 8
    """Maximum number of sessions across all data-parallel ranks."""
    session_idle_s: float = 300.0
    """Idle time in seconds after which a session is closed."""
    by_deadline: bool = False
    """Whether the engine schedules chunks by deadline (`OmniConfig.scheduling`)."""
    window_frames: int | None = None
    """Attention window in latent frames, if sessions may choose a smaller one. None: sessions
    cannot choose the window.
    """
    sink_frames: int | None = None
    """Number of sink frames in the attention window, if sessions may choose fewer. None: sessions
    cannot choose the number.
    """
    chunks_in_flight: int = 1
    """Maximum number of a session's chunks that the engine processes at the same time
    (`OmniConfig`).
    """
    target_fps: float | None = None
    """Frame rate of a stream if the client does not request one. None: the model's frame rate."""
    model: str = ""
    """Name that clients use for the model."""
    preset: str | None = None
    """Server preset (`omni.model.preset`). None: the model has no presets."""
    card: WorldDescription | None = None
    """The checkpoint's world description. None: the checkpoint has no world description."""

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig", model: str) -> "StreamInfo":
        """Return the metadata for the served model and deployment.

        Args:
            vllm_config: vLLM's configuration.
            model: Name that clients use for the model.
        """
        hf_config: dict[str, Any] = vllm_config.model_config.hf_config.to_dict()
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        family = get_family(hf_config["omni_family"])
        info = {
            **(family.stream_info(hf_config, omni) if family.stream_info is not None else {}),
            "actions": ActionSpace()
            if family.action_space is None
            else family.action_space(hf_config, omni),
            "height": omni.height,
            "width": omni.width,
            "max_sessions": omni.max_sessions * num_data_parallel_ranks(vllm_config),
            "session_idle_s": omni.session_idle_s,
            "by_deadline": omni.scheduling == "deadline",
            "chunks_in_flight": omni.chunks_in_flight,
            "target_fps": omni.target_fps,
            "model": model,
            "preset": None
            if family.served_preset is None
            else family.served_preset(hf_config, omni).name,
            "card": hf_config.get(CONFIG_KEY),
        }
        return parse_options(cls, info, f"stream metadata of {family.name}")

    @property
    def needs_image(self) -> bool:
        """Whether a session requires a start image."""
        return self.actions.image == "required"

    def check_prompt(self, prompt: str | None, *, starts_session: bool = False) -> None:
        """Check a prompt.

        Args:
            prompt: The request's prompt.
            starts_session: Whether the request certainly starts a session. If this is not known,
                the engine checks whether a required prompt is missing.

        Raises:
            EndpointError: `invalid_prompt` if there is a prompt but the model accepts none, or
                `invalid_request` if a required prompt is missing.
        """
        if prompt and self.actions.prompt == "none":
            raise EndpointError(
                "invalid_prompt",
                f"this model takes no prompt; it takes {self.actions.takes()}",
                param="prompt",
            )
        if starts_session and not prompt and self.actions.prompt == "required":
            raise EndpointError(
                "invalid_request", "a session's first chunk needs a prompt", param="prompt"
            )

    def check_image(self, has_image: bool, param: str) -> None:
        """Check whether a session may start with, or without, a start image.

        Args:
            has_image: Whether the client sent a start image.
            param: Key of the image in the client's message.

        Raises:
            EndpointError: `invalid_image` if the model takes no start image but the client sent
                one, or `missing_image` if the model requires one but the client sent none.
        """
        if has_image and self.actions.image == "none":
            raise EndpointError(
                "invalid_image",
                f"this model takes no start image; it takes {self.actions.takes()}",
                param=param,
            )
        if not has_image and self.needs_image:
            raise EndpointError(
                "missing_image", f"this model requires a start image; send {param}", param=param
            )

    def check_images(self, names: Iterable[str], param: str = "images") -> None:
        """Check whether a session may start with named images (`ActionSpace.images`).

        Args:
            names: Names of the images that the client sent.
            param: Key of the images in the client's message.

        Raises:
            EndpointError: `invalid_image` if a name is unknown, or `missing_image` if a required
                image is missing.
        """
        sent, allowed = set(names), ", ".join(self.actions.image_names) or "no named images"
        if unknown := sorted(sent - set(self.actions.image_names)):
            raise EndpointError(
                "invalid_image",
                f"unknown images {', '.join(unknown[:3])}; this model takes {allowed}",
                param=param,
            )
        for image in self.actions.images:
            if image.use == "required" and image.name not in sent:
                raise EndpointError(
                    "missing_image",
                    f"this model requires the image {image.name} in {param}",
                    param=param,
                )

    @property
    def max_area(self) -> int:
        return self.height * self.width

    @property
    def size_multiple(self) -> tuple[int, int]:
        """Frame widths and heights must be multiples of these two values, in pixels."""
        return self.patch_size[2] * self.vae_stride[2], self.patch_size[1] * self.vae_stride[1]

    @property
    def first_chunk_frames(self) -> int:
        """Number of pixel frames in a session's first chunk."""
        return self.pixel_frames(
            self.first_chunk_latent_frames or self.latent_frames_per_chunk, starts_session=True
        )

    @property
    def chunk_frames(self) -> int:
        """Number of pixel frames in each chunk except a session's first."""
        return self.vae_stride[0] * self.latent_frames_per_chunk

    def key_intrinsics(self, width: int, height: int) -> list[float]:
        """Return the intrinsics fx, fy, cx, cy assumed for camera keys.

        The intrinsics are in pixels of the reference size, like those that accompany poses.

        Args:
            width: Video width in pixels.
            height: Video height in pixels.
        """
        wide, high = self.intrinsics_reference_size
        focal = self.focal_of_keys(width)
        return [focal * wide / width, focal * high / height, wide / 2, high / 2]

    def focal_of_keys(self, width: int) -> float:
        """Return the focal length assumed for camera keys, in pixels of a video that has the given
        width.
        """
        own = None if self.card is None else self.card.focal
        return self.key_focal if own is None else own * width

    @property
    def pitch_limit_degrees(self) -> float:
        """Return the maximum angle in degrees by which the camera may look above or below the
        horizon.
        """
        return PITCH_LIMIT_DEGREES if self.card is None else self.card.pitch_limit_degrees

    def pixel_frames(self, latent_frames: int, starts_session: bool) -> int:
        """Return the number of pixel frames that correspond to a number of latent frames.

        Args:
            latent_frames: Number of latent frames.
            starts_session: Whether these are a session's first latent frames.
        """
        less = self.vae_stride[0] - self.first_stride if starts_session else 0
        return max(0, self.vae_stride[0] * latent_frames - less)

    def latent_frames(self, pixel_frames: int) -> int:
        """Return the number of latent frames in a chunk that has the given number of pixel
        frames.
        """
        return -(-pixel_frames // self.vae_stride[0])

    def chunk_sizes(self, first: bool) -> Iterator[int]:
        """Yield the number of pixel frames in each subsequent chunk, indefinitely.

        Args:
            first: Whether the next chunk is the session's first.
        """
        if first:
            yield self.first_chunk_frames
        while True:
            yield self.chunk_frames

    def split(self, num_frames: int, first: bool) -> tuple[list[int], int]:
        """Split a number of pixel frames into complete chunks.

        Returns:
            `(sizes, remaining)`: the number of frames in each complete chunk, and the number of
            frames left over.
        """
        sizes: list[int] = []
        for size in self.chunk_sizes(first):
            if size > num_frames:
                return sizes, num_frames
            sizes.append(size)
            num_frames -= size
        raise AssertionError("unreachable: chunk_sizes is endless")

    def check_size(self, height: int, width: int) -> None:
        """Check a frame size.

        Raises:
            EndpointError: `unsupported_size` if the model cannot generate frames of this size.
        """
        wide, high = self.size_multiple
        if width % wide or height % high or height * width > self.max_area:
            raise EndpointError(
                "unsupported_size",
                f"{width}x{height} arrived; width must be a multiple of {wide}, height of {high}, "
                f"and width x height at most {self.max_area}",
                param="extra_body",
            )
