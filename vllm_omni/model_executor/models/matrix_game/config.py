# SPDX-License-Identifier: Apache-2.0
"""The architecture of a Matrix-Game 2.0 checkpoint (`MatrixGameConfig`), and its controls, schedule
and window sizes.

The number of keyboard values identifies the variant. Every config key is checked. Dimensions are
derived from the tensors if possible (`checkpoint.py`), because the released configs are outdated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from vllm_omni.actions import ActionSpace, Axis, Button
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.wan.architecture import (
    IGNORED,
    RENAMED,
    REQUIRED,
    ChunkTransformerConfig,
    check_keys,
    read_architecture,
)
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_TEMPORAL
from vllm_omni.model_executor.presets import Preset, PresetName
from vllm_omni.model_executor.schedules import (
    FewStepSchedule,
    few_step_schedule,
    with_most_steps,
)
from vllm_omni.model_executor.streaming.chunk_plan import resolve_chunks
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

FPS = 25.0
"""Training frame rate in frames per second."""
_SHIFT = 5.0
TURN: Final = 0.1
"""Value that a held turn or look key adds to a mouse axis in each video frame. The original's
console does not send any other magnitude.
"""

_YAW = Axis(
    name="yaw",
    title="turn right",
    unit="(a key turns by 0.1)",
    low=-1.0,
    high=1.0,
    mouse="x",
    scale=0.005,
)
_PITCH = Axis(
    name="pitch",
    title="look up",
    unit="(a key turns by 0.1)",
    low=-1.0,
    high=1.0,
    mouse="y",
    scale=-0.005,
)


@dataclass(frozen=True)
class MatrixGameVariant:
    """A released model, distinguished by its actions."""

    name: str
    """Name of the variant."""
    space: ActionSpace
    """Actions that clients can send."""
    keyboard: tuple[str | None, ...]
    """Button for each column of the keyboard input. None: the column is set while no keys are held.
    """
    turns: Mapping[str, tuple[float, float]]
    """Values (pitch, yaw) that a button adds to the mouse axes, keyed by button name."""
    window_frames: int
    """Number of latent frames that a chunk attends to, including its own."""
    steps: tuple[int, ...]
    """Denoise steps per chunk. Step s refers to entry 1000 - s of the timestep table with shift 5.
    """


def _buttons(*rows: str) -> tuple[Button, ...]:
    """Parse a list of buttons, each given as its name, title and key codes, separated by bars."""
    return tuple(
        Button(name, title, tuple(codes))
        for name, title, *codes in (row.split("|") for row in rows)
    )


_WORLD = _buttons(
    *("w|forward|KeyW", "s|back|KeyS", "a|left|KeyA", "d|right|KeyD", "i|look up|KeyI|ArrowUp"),
    *("k|look down|KeyK|ArrowDown", "j|look left|KeyJ|ArrowLeft", "l|look right|KeyL|ArrowRight"),
)
_CAR = _buttons(
    "w|forward|KeyW", "s|back|KeyS", "a|steer left|KeyA|ArrowLeft", "d|steer right|KeyD|ArrowRight"
)
_RUNNER = _buttons(
    *("jump|jump|KeyW|ArrowUp", "slide|slide|KeyS|ArrowDown", "turn_left|turn left|KeyZ|ArrowLeft"),
    *("turn_right|turn right|KeyC|ArrowRight", "left|left side|KeyA", "right|right side|KeyD"),
)
VARIANTS: Final = (
    MatrixGameVariant(
        "universal",
        ActionSpace(buttons=_WORLD, axes=(_PITCH, _YAW), prompt="none"),
        ("w", "s", "a", "d"),
        {"i": (TURN, 0.0), "k": (-TURN, 0.0), "j": (0.0, -TURN), "l": (0.0, TURN)},
        6,
        (1000, 666, 333),
    ),
    MatrixGameVariant(
        "gta_drive",
        ActionSpace(buttons=_CAR, axes=(_YAW,), prompt="none"),
        ("w", "s"),
        {"a": (0.0, -TURN), "d": (0.0, TURN)},
        4,
        (1000, 666, 333),
    ),
    MatrixGameVariant(
        "templerun",
        ActionSpace(buttons=_RUNNER, exclusive=True, prompt="none"),
        (None, *(button.name for button in _RUNNER)),
        {},
        6,
        (1000, 750, 500, 250),
    ),
)
_BY_KEYS: Final = {len(variant.keyboard): variant for variant in VARIANTS}


@dataclass(frozen=True)
class MatrixGameConfig(ChunkTransformerConfig):
    """Architecture of the transformer. The defaults describe the released universal model."""

    native_size: ClassVar[tuple[int, int]] = (352, 640)
    """Height and width, in pixels, that the released models were trained at."""
    dim: int = 1536
    """Width of the network."""
    ffn_dim: int = 8960
    """Width of the feed-forward layers."""
    in_channels: int = 36
    """Number of input channels."""
    num_heads: int = 12
    """Number of attention heads."""
    num_layers: int = 30
    """Number of transformer blocks."""
    text_dim: int = 1280
    """Width of the image embeddings, which take the place of text embeddings."""
    text_len: int = 257
    """Number of image embeddings."""
    keyboard_dim: int = 4
    """Number of keyboard values per video frame."""
    mouse_dim: int = 2
    """Number of mouse values per video frame. 0: the model has no mouse input."""
    action_blocks: tuple[int, ...] = tuple(range(15))
    """Indices of the layers that have an action module."""
    action_heads: int = 16
    """Number of attention heads in each branch of an action module."""
    keyboard_embed: int = 128
    """Width of the embedding of a video frame's key states."""
    keyboard_width: int = 1024
    """Attention width of the keyboard branch."""
    mouse_width: int = 1024
    """Attention width of the mouse branch."""
    action_rope_dim: int = 8
    """Number of rotated channels per action head."""
    action_rope_theta: float = 256.0
    """Base of the action heads' rotary frequencies."""
    action_latents: int = 3
    """Number of latent frames whose actions condition each latent frame."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out_channels != LATENT_CHANNELS or self.in_channels != 2 * LATENT_CHANNELS + 4:
            raise ValueError(
                f"channels must be 36 in (16 noisy, 4 mask, 16 condition) and 16 out, "
                f"got {self.in_channels} and {self.out_channels}"
            )
        if self.keyboard_dim not in _BY_KEYS:
            known = ", ".join(f"{keys} ({variant.name})" for keys, variant in _BY_KEYS.items())
            raise ValueError(
                f"the keyboard has {self.keyboard_dim} keys; the released streaming models "
                f"have {known}"
            )
        if (self.mouse_dim > 0) != (self.variant.name != "templerun") or self.mouse_dim not in (
            0,
            2,
        ):
            raise ValueError(
                f"{self.variant.name} with {self.mouse_dim} mouse values is no released model"
            )
        for width in (self.keyboard_width, self.mouse_width):
            if width % self.action_heads or width // self.action_heads < self.action_rope_dim:
                raise ValueError(
                    f"{width} over {self.action_heads} heads must give heads of at least "
                    f"{self.action_rope_dim}"
                )
        if any(layer not in range(self.num_layers) for layer in self.action_blocks):
            raise ValueError(
                f"action blocks {self.action_blocks} must be among {self.num_layers} layers"
            )

    @property
    def variant(self) -> MatrixGameVariant:
        return _BY_KEYS[self.keyboard_dim]

    @property
    def action_frames(self) -> int:
        """Return the number of video frames whose actions condition each latent frame."""
        return VAE_TEMPORAL * self.action_latents

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "MatrixGameConfig":
        """Read a transformer's `config.json`, with the keys of either layout. For an empty mapping,
        the released universal model's config is returned. If the config does not specify a window,
        the variant's window is used.

        Raises:
            ValueError: A key is unknown, or a value is not supported.
        """
        skipped = (
            [] if values.get("local_attn_size", -1) != -1 else ["local_attn_size", "sink_size"]
        )
        fields = read_architecture(
            values, _RENAMED, _REQUIRED, (*_IGNORED, *skipped), cls.num_heads, cls.dim
        )
        return cls(**fields, **_action_fields(values.get("action_config", {}), fields["dim"]))


_RENAMED = {key: name for key, name in RENAMED.items() if key not in ("text_dim", "text_len")} | {
    "image_dim": "text_dim",
    "context_tokens": "text_len",
}
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": (
        "CausalWanModel",
        "WanModel",
        "MatrixGameWanModel",
        "CausalMatrixGameWanModel",
        "CausalMatrixGameWanTransformer3DModel",
        "MatrixGameWanTransformer3DModel",
    ),
    "model_type": ("i2v",),
    "timestep_shift": (_SHIFT,),
    **{
        key: allowed
        for key, allowed in REQUIRED.items()
        if key not in ("image_dim", "added_kv_proj_dim")
    },
}
_IGNORED = (
    *IGNORED,
    "action_config",
    "text_dim",
    "text_len",
    "inject_sample_info",
    "latent_hw",
    "added_kv_proj_dim",
)

_ACTION_RENAMED = {
    "keyboard_dim_in": "keyboard_dim",
    "mouse_dim_in": "mouse_dim",
    "heads_num": "action_heads",
    "hidden_size": "keyboard_embed",
    "keyboard_hidden_dim": "keyboard_width",
    "mouse_hidden_dim": "mouse_width",
    "rope_theta": "action_rope_theta",
    "windows_size": "action_latents",
}
_ACTION_REQUIRED: dict[str, tuple[Any, ...]] = {
    "enable_keyboard": (True,),
    "qk_norm": (True,),
    "qkv_bias": (False,),
    "vae_time_compression_ratio": (VAE_TEMPORAL,),
}
_ACTION_OTHERS = ("blocks", "enable_mouse", "patch_size", "rope_dim_list", "mouse_qk_dim_list")


def _action_fields(values: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Read `action_config`. Raises ValueError under the same conditions as `from_checkpoint`."""
    required = {**_ACTION_REQUIRED, "img_hidden_size": (dim,)}
    check_keys(values, "action_config", _ACTION_RENAMED, required, _ACTION_OTHERS)
    fields = {
        name: values[key] for key, name in _ACTION_RENAMED.items() if values.get(key) is not None
    }
    if "blocks" in values:
        fields["action_blocks"] = tuple(values["blocks"])
    if values.get("enable_mouse") is False:
        fields["mouse_dim"] = 0
        fields["mouse_width"] = fields.get("keyboard_width", MatrixGameConfig.keyboard_width)
    rotated = values.get("mouse_qk_dim_list") or values.get("rope_dim_list")
    if rotated:
        # The value applies to both branches. A head's other channels are not rotated.
        fields["action_rope_dim"] = rotated[0]
    return fields


PRESETS: Final[Mapping[PresetName, Preset]] = {
    "reference": Preset(),
    "realtime": Preset(model={"max_steps": 2, "decoder": "tiny"}),
    "small": Preset(
        model={"decoder": "tiny", "text_encoder_device": "cpu"},
        quantization="fp8",
        kv_cache_dtype="fp8",
    ),
}
"""Only `small` uses FP8. The network is narrow and its window is short, so FP8 saves memory but
hardly any time. A `balanced` preset would be identical to `reference`.
"""


class MatrixGameOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`StreamingOptions` with this family's presets."""

    presets: ClassVar[Mapping[PresetName, Preset]] = PRESETS


def schedule_of(variant: MatrixGameVariant, max_steps: int | None = None) -> FewStepSchedule:
    """Return a variant's denoise schedule. It is computed in fp32, as in training, because fp64
    would change the timesteps by 1e-4.
    """
    indices = [1000 - step for step in variant.steps]
    return with_most_steps(few_step_schedule("exact", _SHIFT, indices, np.float32), max_steps)


MatrixGameStream = StreamModelSetup[MatrixGameConfig, MatrixGameOptions]


def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> MatrixGameStream:
    """Read the family's part of `hf_config` and the serving options. Raises ValueError if either is
    invalid.
    """
    config, options = (
        MatrixGameConfig.from_checkpoint(checkpoint["transformer"]),
        MatrixGameOptions.read_options(omni.model),
    )
    window = config.variant.window_frames
    plan = resolve_chunks(options, config, chunk_frames=3, window_frames=window, sink_frames=0)
    schedule = schedule_of(config.variant, options.max_steps)
    return StreamModelSetup(config, options, plan, schedule.num_steps)
