# SPDX-License-Identifier: Apache-2.0
"""A Waypoint checkpoint's sizes (`WaypointConfig`, of `config.yaml`), its controls, and the choices left to the user.

Two generations share the network: Waypoint-1 (gates, text, one video frame a latent) and 1.5 (value residual, no text,
four video frames a latent). Held by tests/model_executor/models/waypoint/test_waypoint_config.py.
"""

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final, Literal

import torch

from vllm_omni.actions import ActionRows, ActionSpace, Axis, Button
from vllm_omni.model_executor.schedules import EulerSchedule
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, FrameRate
from vllm_omni.model_executor.streaming.options import StreamingOptions

logger = logging.getLogger("vllm." + __name__)

Tables = Literal["exact", "served"]
"""Of noise and rotary frequencies: as defined, or rounded to bf16 as the original engine serves them."""
BiasIn = Literal["each", "mlp"]
"""Of a block's modulation: attention and MLP use their own bias, as released, or both the MLP's, as the original does.
"""
CODEC_STRIDE: Final = 16
"""Pixels of the autoencoder's frame along a side of one latent cell, in both generations."""
NOISE_WIDTH: Final = 512
PROMPT_ROWS: Final = 512
"""Rows of an encoded prompt. Rows past its end are zero and are attended to all the same."""

DEFAULT_PROMPT: Final = "An explorable world"
"""Of Waypoint-1, for a session without one."""
SIZE_MULTIPLE: Final = 8
"""Frames are resized to any height and width that are multiples of this."""

_WAYPOINT_1_SIGMAS = (1.0, 0.8609585762023926, 0.729332447052002, 0.3205108940601349, 0.0)


@dataclass(frozen=True, kw_only=True)
class WaypointConfig:
    """Architecture, under `config.yaml`'s own names; defaults are those of a key that the file leaves out.

    height, width: of the token grid, after patching. channels: of latents. local_window, global_window: frames, itself
    included; a global layer keeps every `global_pinned_dilation`-th frame. scheduler_sigmas: from 1 to 0, the noise
    level of each step. base_fps, inference_fps: latents and video frames per second as trained and served.
    """

    d_model: int
    n_layers: int
    n_heads: int
    mlp_ratio: int
    channels: int
    height: int
    width: int
    local_window: int
    global_window: int
    global_pinned_dilation: int
    global_attn_period: int
    base_fps: int
    model_type: str = "waypoint-1"
    n_kv_heads: int = 0
    tokens_per_frame: int = 0
    global_attn_offset: int = 0
    patch: tuple[int, int] = (1, 1)
    n_buttons: int = 256
    ctrl_conditioning_period: int = 3
    prompt_conditioning: str | None = None
    prompt_conditioning_period: int | None = None
    prompt_embedding_dim: int | None = None
    scheduler_sigmas: tuple[float, ...] = _WAYPOINT_1_SIGMAS
    inference_fps: int = 0
    temporal_compression: int = 1
    value_residual: bool = False
    gated_attn: bool = False
    rope_nyquist_frac: float = 0.8
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name, default in (
            ("n_kv_heads", self.n_heads),
            ("tokens_per_frame", self.height * self.width),
            ("inference_fps", self.base_fps),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        self._check()

    def _check(self) -> None:
        sigmas, sizes = self.scheduler_sigmas, {name: getattr(self, name) for name in sorted(_SIZES)}
        width, heads = self.prompt_embedding_dim, (self.n_heads, self.n_kv_heads)
        cells = self.height * self.width
        if min(sizes.values()) < 1:
            raise ValueError(f"config.yaml: sizes must be at least 1, got {sizes}")
        problems = {
            f"tokens_per_frame is {self.tokens_per_frame}, height x width is {cells}": self.tokens_per_frame != cells,
            f"d_model {self.d_model} over {heads[0]} heads must give a multiple of 8": self.d_model % (8 * heads[0]),
            f"{heads[0]} heads do not divide over {heads[1]} key-value heads": heads[0] % heads[1],
            f"global_window {self.global_window} is no multiple of the dilation {self.global_pinned_dilation}": (
                self.global_window % self.global_pinned_dilation
            ),
            f"scheduler_sigmas must fall to 0, got {list(sigmas)}": (
                len(sigmas) < 2 or sigmas[-1] != 0 or any(a <= b for a, b in itertools.pairwise(sigmas))
            ),
            f"prompt_embedding_dim {width} must be a multiple of {self.head_dim}": (
                self.prompted and (not width or width % self.head_dim)
            ),
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(f"config.yaml: {problem}")

    # -- derived -------------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.n_layers

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
        """Height and width, in pixels, of the frames that the autoencoder of 1.5 reads and makes."""
        return self.latent_shape[1] * CODEC_STRIDE, self.latent_shape[2] * CODEC_STRIDE

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width, in pixels, of the video: 720x1280 or 360x640, which 1.5 squeezes to `codec_size`."""
        if self.temporal_compression == 1:
            return 360, 640
        height, width = self.codec_size
        return height * 45 // 32 // SIZE_MULTIPLE * SIZE_MULTIPLE, width * 5 // 4 // SIZE_MULTIPLE * SIZE_MULTIPLE

    @property
    def time_step(self) -> int:
        """Rotary positions between two latent frames."""
        return self.base_fps * self.temporal_compression // self.inference_fps

    @property
    def prompted(self) -> bool:
        return self.prompt_conditioning is not None

    @property
    def plan(self) -> ChunkPlan:
        """One latent frame a chunk, also the first; the longer kind of ring decides how far a frame sees."""
        stride = self.temporal_compression
        return ChunkPlan(1, 1, self.global_window, 0, FrameRate(first=stride, later=stride))

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Latent height and width, of every video size. Raises ValueError for one that frames are not resized to."""
        if height % SIZE_MULTIPLE or width % SIZE_MULTIPLE:
            raise ValueError(f"{height}x{width}: height and width must be multiples of {SIZE_MULTIPLE}")
        return self.latent_shape[1], self.latent_shape[2]

    def schedule(self, tables: Tables, dtype: torch.dtype) -> EulerSchedule:
        """Steps of a frame; `served`: noise levels rounded to the model's type, as in the original."""
        sigmas = self.scheduler_sigmas
        if tables == "served":
            sigmas = tuple(torch.tensor(sigmas).to(dtype).tolist())
        return EulerSchedule(sigmas, dtype)

    def is_global(self, layer: int) -> bool:
        return (layer - self.global_attn_offset) % self.global_attn_period == 0

    def controlled(self, layer: int) -> bool:
        return layer % self.ctrl_conditioning_period == 0

    def reads_prompt(self, layer: int) -> bool:
        return self.prompted and layer % (self.prompt_conditioning_period or self.ctrl_conditioning_period) == 0

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "WaypointConfig":
        """Read the mapping of a `config.yaml`. Raises ValueError on missing keys and values not implemented.

        Unknown keys are logged and left alone: the published files were not all seen.
        """
        known = {field.name for field in fields(cls)}
        missing = sorted(
            field.name for field in fields(cls) if field.name in _REQUIRED and values.get(field.name) is None
        )
        if missing:
            raise ValueError(f"config.yaml lacks {', '.join(missing)}; this is no Waypoint checkpoint, or damaged")
        for key, allowed in _IMPLEMENTED.items():
            if key in values and values[key] not in allowed:
                raise ValueError(f"config.yaml has {key} = {values[key]!r}; this model implements {allowed}")
        unknown = sorted(set(values) - known - set(_IMPLEMENTED) - _UNUSED)
        if unknown:
            logger.warning("config.yaml has keys that this model does not read: %s", ", ".join(map(str, unknown[:8])))
        given = {key: value for key, value in values.items() if key in known and value is not None}
        for key in ("patch", "scheduler_sigmas"):
            if key in given:
                given[key] = tuple(given[key])
        for key, value in given.items():
            if key in _SIZES and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"config.yaml has {key} = {value!r}; it must be a whole number")
        return cls(**given)


_REQUIRED = frozenset(
    (
        *("d_model", "n_layers", "n_heads", "mlp_ratio", "channels", "height", "width", "local_window"),
        *("global_window", "global_pinned_dilation", "global_attn_period", "base_fps"),
    )
)
_SIZES = _REQUIRED | {
    *("n_kv_heads", "tokens_per_frame", "n_buttons", "ctrl_conditioning_period", "inference_fps"),
    "temporal_compression",
}
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("waypoint-1", "waypoint-1.1", "waypoint-1.5"),
    "noise_conditioning": ("wan",),
    "ctrl_conditioning": ("mlp_fusion", True),
    "prompt_conditioning": (None, "cross_attention"),
    "moe": (False, None),
}
_UNUSED = frozenset(
    (
        *("auto_aspect_ratio", "ctrl_cond_dropout", "prompt_cond_dropout", "n_frames", "taehv_ae", "ae_uri"),
        "prompt_encoder_uri",
    )
)


@dataclass(frozen=True)
class FrequencyTables:
    """Constants of the network, fp32 on the CPU. noise: [256]. xy: of a spatial axis's lanes. time: of the temporal's.

    kind `served`: rounded to bf16, as the original engine has them once its module is cast.
    """

    noise: torch.Tensor
    xy: torch.Tensor
    time: torch.Tensor

    @classmethod
    def of(cls, config: WaypointConfig, kind: Tables) -> "FrequencyTables":
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # not where models are being built
        half = NOISE_WIDTH // 2
        noise = torch.pow(10000.0, -torch.arange(half, **exact) / (half - 1))
        spatial, temporal = config.head_dim // 8, config.head_dim // 4
        fastest = config.rope_nyquist_frac / 2 * min(config.height, config.width)
        xy = math.pi * torch.linspace(1.0, fastest, -(-spatial // 2), **exact)
        exponents = 2 * torch.arange(temporal // 2, **exact) / temporal
        time = torch.pow(config.rope_theta, -exponents)
        tables = [table.float() for table in (noise, xy.repeat_interleave(2)[:spatial], time.repeat_interleave(2))]
        if kind == "served":
            tables = [table.bfloat16().float() for table in tables]
        return cls(*tables)


# -- options -----------------------------------------------------------------------------------------------------------


def read_options(given: Mapping[str, Any]) -> StreamingOptions:
    """`StreamingOptions.read`. Raises ValueError for an option of what the checkpoint fixes, too."""
    fixed = [name for name in _FIXED if name in given]
    if fixed:
        raise ValueError(
            f"omni.model: drop {', '.join(fixed)}: a Waypoint checkpoint fixes its windows, chunks and decoder, "
            "and its ranks share layers by tensor parallelism"
        )
    return StreamingOptions.read(given)


_FIXED = (
    *("latent_frames_per_chunk", "first_chunk_latent_frames", "window_frames", "sink_frames", "decoder"),
    "sequence_parallel",
)

# -- controls ----------------------------------------------------------------------------------------------------------

_NAMED_KEYS: Final[Mapping[int, tuple[str, str, str]]] = {
    0x01: ("mouse_left", "left button", "Mouse0"),
    0x02: ("mouse_right", "right button", "Mouse2"),
    0x04: ("mouse_middle", "middle button", "Mouse1"),
    0x08: ("backspace", "Backspace", "Backspace"),
    0x09: ("tab", "Tab", "Tab"),
    0x0D: ("enter", "Enter", "Enter"),
    0x10: ("shift", "Shift", "ShiftLeft"),
    0x11: ("ctrl", "Ctrl", "ControlLeft"),
    0x12: ("alt", "Alt", "AltLeft"),
    0x1B: ("escape", "Escape", "Escape"),
    0x20: ("space", "Space", "Space"),
    0x25: ("left", "arrow left", "ArrowLeft"),
    0x26: ("up", "arrow up", "ArrowUp"),
    0x27: ("right", "arrow right", "ArrowRight"),
    0x28: ("down", "arrow down", "ArrowDown"),
    **{0x30 + digit: (str(digit), str(digit), f"Digit{digit}") for digit in range(10)},
    **{ord(letter): (letter.lower(), letter, f"Key{letter}") for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
    **{0x6F + number: (f"f{number}", f"F{number}", f"F{number}") for number in range(1, 13)},
}
"""Windows virtual-key code -> name, title, the browser's code. The other codes are `vk_XX`, in hexadecimal."""


def _button(code: int) -> Button:
    if code not in _NAMED_KEYS:
        return Button(f"vk_{code:02x}", f"virtual key {code:#04x}")
    name, title, browser = _NAMED_KEYS[code]
    return Button(name, title, (browser,))


@cache
def action_space(config: WaypointConfig) -> ActionSpace:
    """A button for each virtual-key code, the mouse's motion since the last latent frame, the wheel."""
    return ActionSpace(
        buttons=tuple(_button(code) for code in range(config.n_buttons)),
        axes=(
            Axis(name="dx", title="mouse right", unit="pixels", kind="motion", mouse="x"),
            Axis(name="dy", title="mouse down", unit="pixels", kind="motion", mouse="y"),
        ),
        scroll=True,
        prompt="optional" if config.prompted else "none",
        image="optional",
    )


def control_vectors(rows: ActionRows) -> torch.Tensor:
    """Controls -> fp32 [N, buttons + 3]: mouse dx, dy, then every button, then the wheel's sign."""
    return torch.cat((rows.axes_NA, rows.buttons_NB.float(), rows.scroll_N.sign().unsqueeze(1)), dim=1)
