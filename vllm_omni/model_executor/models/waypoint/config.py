# SPDX-License-Identifier: Apache-2.0
"""Architecture of a Waypoint checkpoint (`WaypointConfig`, from `config.yaml`), its controls, and
its serving configuration.

Two generations of models share the network. Waypoint-1 has gates, text input, and one video frame
per latent frame. Waypoint 1.5 has a value residual, no text input, and four video frames per latent
frame.
"""

import itertools
import logging
from collections.abc import Mapping
from functools import cache
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, Final

import msgspec
import torch

from vllm_omni.actions import ActionFrames, ActionSpace, Axis, Button
from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.model_executor.models.wan.architecture import check_implemented
from vllm_omni.model_executor.presets import Preset, PresetName
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, FrameRate
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

logger = logging.getLogger("vllm." + __name__)

CODEC_STRIDE: Final = 16
"""Side length of a latent cell, in pixels of the autoencoder's frames, in both generations."""
PROMPT_ROWS: Final = 512
"""Sequence length of an encoded prompt. Padded positions are zero and take part in attention."""

DEFAULT_PROMPT: Final = "An explorable world"
"""Default prompt of Waypoint-1."""
SIZE_MULTIPLE: Final = 8
"""Height and width of the video must be multiples of this number of pixels."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class WaypointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of a network. Fields are named after the keys in `config.yaml`. The field
    defaults apply to keys that the file omits.
    """

    d_model: Count
    """Width of the network."""
    n_layers: Count
    """Number of blocks."""
    n_heads: Count
    """Number of query heads."""
    mlp_ratio: Count
    """Width of the feed-forward layers, as a multiple of `d_model`."""
    channels: Count
    """Number of latent channels."""
    height: Count
    """Number of rows in the token grid, after patching."""
    width: Count
    """Number of columns in the token grid, after patching."""
    local_window: Count
    """Number of frames that a local layer attends to, including the current one."""
    global_window: Count
    """Number of frames that a global layer's window covers, including the current one."""
    global_pinned_dilation: Count
    """Distance n between retained frames: a global layer retains every n-th frame of its window."""
    global_attn_period: Count
    """Period n of the global layers: every n-th layer is global."""
    base_fps: Count
    """Number of latent frames per second in training."""
    model_type: str = "waypoint-1"
    """Generation of the model, for example `waypoint-1.5`."""
    n_kv_heads: Count = 0
    """Number of key/value heads. Default: `n_heads`."""
    tokens_per_frame: Count = 0
    """Number of tokens in a latent frame. Default: `height * width`."""
    global_attn_offset: int = 0
    """Index of the first global layer, modulo `global_attn_period`."""
    patch: tuple[Count, Count] = (1, 1)
    """Number of latent rows and columns that form a token."""
    n_buttons: Count = 256
    """Number of buttons in the controls."""
    ctrl_conditioning_period: Count = 3
    """Period n: every n-th block has a `ControlFusion`."""
    prompt_conditioning: str | None = None
    """How a prompt conditions the network: `cross_attention`, or None if the model takes no
    prompts.
    """
    prompt_conditioning_period: Count | None = None
    """Period n: every n-th block has a `CrossAttention`. Default: `ctrl_conditioning_period`."""
    prompt_embedding_dim: Count | None = None
    """Width of the text embeddings."""
    scheduler_sigmas: tuple[float, ...] = (
        1.0,
        0.8609585762023926,
        0.729332447052002,
        0.3205108940601349,
        0.0,
    )
    """Noise level before each denoise step, from 1 down to 0."""
    inference_fps: Count = 0
    """Number of video frames per second when the model is served. Default: `base_fps`."""
    temporal_compression: Count = 1
    """Number of video frames per latent frame."""
    value_residual: bool = False
    """Whether layers mix in the attention values of the first layer."""
    gated_attn: bool = False
    """Whether attention heads have gates."""
    rope_nyquist_frac: float = 0.8
    """Highest spatial rotary frequency, as a fraction of the Nyquist frequency."""
    rope_theta: float = 10000.0
    """Base of the temporal rotary frequencies."""

    def __post_init__(self) -> None:
        sigmas, width, cells = (
            self.scheduler_sigmas,
            self.prompt_embedding_dim,
            self.height * self.width,
        )
        msgspec.structs.force_setattr(self, "n_kv_heads", self.n_kv_heads or self.n_heads)
        msgspec.structs.force_setattr(self, "tokens_per_frame", self.tokens_per_frame or cells)
        msgspec.structs.force_setattr(self, "inference_fps", self.inference_fps or self.base_fps)
        heads = self.n_heads, self.n_kv_heads
        problems = {
            f"tokens_per_frame is {self.tokens_per_frame}, height x width "
            f"is {cells}": self.tokens_per_frame != cells,
            f"d_model {self.d_model} over {heads[0]} heads must give a multiple of 8": self.d_model
            % (8 * heads[0]),
            f"{heads[0]} heads do not divide over {heads[1]} key-value heads": heads[0] % heads[1],
            f"global_window {self.global_window} is no multiple of the dilation "
            f"{self.global_pinned_dilation}": (self.global_window % self.global_pinned_dilation),
            f"scheduler_sigmas must fall to 0, got {list(sigmas)}": (
                len(sigmas) < 2
                or sigmas[-1] != 0
                or any(a <= b for a, b in itertools.pairwise(sigmas))
            ),
            f"prompt_embedding_dim {width} must be a multiple of {self.head_dim}": (
                self.prompted and (not width or width % self.head_dim)
            ),
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(problem)

    # -- derived -----------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.n_layers

    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def mlp_dim(self) -> int:
        return self.mlp_ratio * self.d_model

    @property
    def control_values(self) -> int:
        return self.n_buttons + 3

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.channels, self.height * self.patch[0], self.width * self.patch[1]

    @property
    def codec_size(self) -> tuple[int, int]:
        """Height and width of the autoencoder's frames in pixels, in Waypoint 1.5."""
        return self.latent_shape[1] * CODEC_STRIDE, self.latent_shape[2] * CODEC_STRIDE

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width of the video in pixels: (720, 1280) or (360, 640). Waypoint 1.5 resizes
        frames between this size and `codec_size`.
        """
        if self.temporal_compression == 1:
            return 360, 640
        height, width = self.codec_size
        return (
            height * 45 // 32 // SIZE_MULTIPLE * SIZE_MULTIPLE,
            width * 5 // 4 // SIZE_MULTIPLE * SIZE_MULTIPLE,
        )

    @property
    def time_step(self) -> int:
        """Distance between consecutive latent frames, in rotary positions."""
        return self.base_fps * self.temporal_compression // self.inference_fps

    @property
    def prompted(self) -> bool:
        return self.prompt_conditioning is not None

    @property
    def plan(self) -> ChunkPlan:
        """The chunk plan. Every chunk, including the first, has one latent frame. The longer of the
        two ring buffers determines how many frames are visible.
        """
        stride = self.temporal_compression
        return ChunkPlan(1, 1, self.global_window, 0, FrameRate(first=stride, later=stride))

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the latent height and width. The latent size does not depend on the video size.

        Raises:
            ValueError: The size is not supported.
        """
        if height % SIZE_MULTIPLE or width % SIZE_MULTIPLE:
            raise ValueError(
                f"{height}x{width}: height and width must be multiples of {SIZE_MULTIPLE}"
            )
        return self.latent_shape[1], self.latent_shape[2]

    def is_global(self, layer: int) -> bool:
        return (layer - self.global_attn_offset) % self.global_attn_period == 0

    def controlled(self, layer: int) -> bool:
        return layer % self.ctrl_conditioning_period == 0

    def reads_prompt(self, layer: int) -> bool:
        return (
            self.prompted
            and layer % (self.prompt_conditioning_period or self.ctrl_conditioning_period) == 0
        )

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "WaypointConfig":
        """Create the config from the mapping in a `config.yaml`. Raises ValueError if keys are
        missing or values are not supported.

        Unknown keys are logged and ignored, because not all published files were available.
        """
        given = {key: value for key, value in values.items() if value is not None}
        check_implemented(values, "config.yaml", _IMPLEMENTED)
        if unknown := sorted(set(map(str, values)) - cls.known_keys()):
            logger.warning(
                "config.yaml has keys that this model does not read: %s", ", ".join(unknown[:8])
            )
        return parse_options(cls, given, "config.yaml")

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        """Return the keys of a `config.yaml` that are read or validated, or that are known to
        affect only training.
        """
        return frozenset((*cls.__struct_fields__, *_IMPLEMENTED, *_UNUSED))


_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("waypoint-1", "waypoint-1.1", "waypoint-1.5"),
    "noise_conditioning": ("wan",),
    "ctrl_conditioning": ("mlp_fusion", True),
    "prompt_conditioning": (None, "cross_attention"),
    "moe": (False, None),
}
_UNUSED = (
    "auto_aspect_ratio",
    "ctrl_cond_dropout",
    "prompt_cond_dropout",
    "n_frames",
    "taehv_ae",
    "ae_uri",
    "prompt_encoder_uri",
)
"""Keys of `config.yaml` to ignore, because they affect only training or describe other files."""
_FIXED: Final = (
    "latent_frames_per_chunk",
    "first_chunk_latent_frames",
    "window_frames",
    "sink_frames",
    "context_kv",
    "decoder",
    "max_steps",
    "first_chunk_steps",
    "sequence_parallel",
)
"""Options that users cannot set, because the checkpoint determines them."""

PRESETS: Final[Mapping[PresetName, Preset]] = {
    "reference": Preset(),
    "small": Preset(model={"text_encoder_device": "cpu"}, quantization="fp8", kv_cache_dtype="fp8"),
}
"""There is no faster preset, because the checkpoint determines the steps, the windows and the
decoder."""


class WaypointOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`StreamingOptions` with this family's presets."""

    presets: ClassVar[Mapping[PresetName, Preset]] = PRESETS


WaypointStream = StreamModelSetup[WaypointConfig, WaypointOptions]


def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> WaypointStream:
    """Read the family's part of `hf_config` and the serving options. Raises ValueError if either is
    invalid.
    """
    config = WaypointConfig.from_checkpoint(checkpoint["transformer"])
    return StreamModelSetup(config, WaypointOptions.read_unless(_FIXED, omni.model), config.plan)


# -- controls --------------------------------------------------------------------------------------

_KEYS: Final[Mapping[int, str]] = {
    0x01: "mouse_left Mouse0",
    0x02: "mouse_right Mouse2",
    0x04: "mouse_middle Mouse1",
    0x08: "backspace Backspace",
    0x09: "tab Tab",
    0x0D: "enter Enter",
    0x1B: "escape Escape",
    0x20: "space Space",
    0x10: "shift ShiftLeft",
    0x11: "ctrl ControlLeft",
    0x12: "alt AltLeft",
    0x25: "left ArrowLeft",
    0x26: "up ArrowUp",
    0x27: "right ArrowRight",
    0x28: "down ArrowDown",
    **{0x30 + digit: f"{digit} Digit{digit}" for digit in range(10)},
    **{ord(letter): f"{letter.lower()} Key{letter}" for letter in ascii_uppercase},
    **{0x6F + number: f"f{number} F{number}" for number in range(1, 13)},
}
"""Name of the button and the browser's key code for each Windows virtual-key code."""


def virtual_key(code: int) -> Button:
    """Return the button for a virtual-key code. If the code has no name, the button is named after
    the code, for example vk_5b.
    """
    name, *codes = _KEYS.get(code, f"vk_{code:02x}").split()
    return Button(name, name.replace("_", " ").capitalize(), tuple(codes))


@cache
def action_space(config: WaypointConfig) -> ActionSpace:
    """Return the controls: one button per virtual-key code, the mouse's motion since the last
    latent frame, and the wheel.
    """
    return ActionSpace(
        buttons=tuple(virtual_key(code) for code in range(config.n_buttons)),
        axes=(
            Axis(name="dx", title="mouse right", unit="pixels", kind="motion", mouse="x"),
            Axis(name="dy", title="mouse down", unit="pixels", kind="motion", mouse="y"),
        ),
        scroll=True,
        prompt="optional" if config.prompted else "none",
        image="optional",
    )


def control_vectors(actions: ActionFrames) -> torch.Tensor:
    """Convert controls to vectors, fp32 [N, buttons + 3]. A vector consists of the mouse's dx and
    dy, one value per button, and the sign of the wheel's motion.
    """
    return torch.cat(
        (actions.axes_NA, actions.buttons_NB.float(), actions.scroll_N.sign().unsqueeze(1)), dim=1
    )
