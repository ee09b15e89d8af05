# SPDX-License-Identifier: Apache-2.0
"""The architecture of an ABot-World-0 checkpoint (`AbotWorldConfig`), and its controls, reference
images, options and schedule.

The released `config.json` contains only the dimensions of the Wan 2.2 TI2V-5B backbone. The window
and the references come from the defaults in the original code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from vllm_omni.actions import CAMERA_SPACE, ActionSpace, NamedImage
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.wan.architecture import (
    IGNORED,
    RENAMED,
    REQUIRED,
    Trunk5BConfig,
    read_architecture,
)
from vllm_omni.model_executor.presets import Preset, PresetName
from vllm_omni.model_executor.schedules import (
    FewStepSchedule,
    few_step_schedule,
    with_most_steps,
)
from vllm_omni.model_executor.streaming.chunk_plan import resolve_chunks
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

FPS: Final = 16.0
"""Training frame rate in frames per second."""
REFERENCES: Final = ("head", "left", "right", "front", "back")
"""Names of the reference images, in slot order."""
KEY_PLANES: Final = 4
"""Number of input planes per key: one for each video frame in a latent frame."""
WINDOW_FRAMES: Final = 21
"""Number of latent frames that a chunk attends to, including its own."""
STEPS: Final = (1000, 750, 500, 250)
"""Denoise steps per chunk. Step s refers to entry 1000 - s of the timestep table with shift 5."""
_SHIFT: Final = 5.0
_SLOT_DISTANCE = 256

SPACE: Final = ActionSpace(buttons=CAMERA_SPACE.buttons, prompt="optional")
"""Controls of a model without reference images. The buttons are in the order in which the network
expects them."""


@dataclass(frozen=True)
class AbotWorldConfig(Trunk5BConfig):
    """Architecture of the transformer. The defaults describe the released model."""

    key_reduction: int = 16
    """Space-to-depth factor of the action adapter: blocks of this many pixels per side are folded
    into channels.
    """
    reference_slots: int = len(REFERENCES)
    """Number of reference images."""
    reference_size: int = 512
    """Height and width of the reference images, in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink_frames:
            raise ValueError(
                f"sink_size must be 0 with carried positions, got {self.sink_frames}; the "
                "original refuses it too"
            )
        if not 0 <= self.reference_slots <= len(REFERENCES):
            raise ValueError(
                f"ref_num_slots must be 0 to {len(REFERENCES)}, got {self.reference_slots}"
            )
        self.latent_size(self.reference_size, self.reference_size)

    @property
    def tokens_per_reference(self) -> int:
        return self.tokens_per_frame(self.reference_size, self.reference_size)

    @property
    def reference_tokens(self) -> int:
        return self.reference_slots * self.tokens_per_reference

    def reference_position(self, slot: int) -> int:
        """Return the temporal position of a reference image. It is lower than every frame's
        position.
        """
        distance = max(self.tokens_per_reference, _SLOT_DISTANCE)
        return -(self.reference_slots - slot) * distance

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "AbotWorldConfig":
        """Read a transformer's `config.json`, with the keys of either layout. For an empty mapping,
        the released model's config is returned.

        Raises:
            ValueError: A key is unknown, or a value is not supported.
        """
        skipped = [] if values.get("local_attn_size", -1) != -1 else ["local_attn_size"]
        ignored = (*IGNORED, *skipped)
        return cls(
            **read_architecture(values, _RENAMED, _REQUIRED, ignored, cls.num_heads, cls.dim)
        )


_RENAMED = {
    **RENAMED,
    "downscale_factor_control_adapter": "key_reduction",
    "ref_num_slots": "reference_slots",
    "ref_resolution": "reference_size",
}
_REQUIRED: dict[str, tuple[Any, ...]] = {
    **REQUIRED,
    "_class_name": ("WanModel", "CausalWanModel", "ABotWorldTransformer3DModel"),
    "model_type": ("ti2v", "ci2v"),
    "act_control_in_dim": (len(SPACE.buttons) * KEY_PLANES,),
    "use_relative_rope": (True,),
    "timestep_shift": (_SHIFT,),
}

PRESETS: Final[Mapping[PresetName, Preset]] = {
    "reference": Preset(),
    "balanced": Preset(quantization="fp8", kv_cache_dtype="fp8"),
    "realtime": Preset(
        model={"max_steps": 2, "decoder": "tiny"}, quantization="fp8", kv_cache_dtype="fp8"
    ),
    "small": Preset(model={"text_encoder_device": "cpu"}, quantization="fp8", kv_cache_dtype="fp8"),
}
"""All presets use the tiny decoder, as the release does."""


class AbotWorldOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`StreamingOptions` and the options specific to ABot-World."""

    presets: ClassVar[Mapping[PresetName, Preset]] = PRESETS

    decoder: Literal["wan", "tiny"] = "tiny"
    """Network that decodes latents to frames. `tiny`: the tiny autoencoder TAEW2.2 (`taew2_2.pth`
    in the checkpoint's directory), as in the release. `wan`: the Wan VAE, which takes as long as
    the transformer."""
    positions: Literal["carried", "window"] = "carried"
    """Frame positions relative to the reference images. `carried`: a frame's position is its index
    minus a base. Before a position would exceed 256, the oldest visible frame becomes the base.
    `window`: the oldest visible frame of each chunk has position 0.
    """
    reference_slots: Annotated[int, msgspec.Meta(ge=0, le=len(REFERENCES))] | None = None
    """Number of reference images. The tokens of a missing image are zeros, as in the original. 0:
    no reference tokens, which the released model was not trained for. Default: 5.
    """

    def schedule(self) -> FewStepSchedule:
        """Return the denoise schedule. The schedule is computed in fp32, as in the original."""
        indices = [1000 - step for step in STEPS]
        steps = few_step_schedule("exact", _SHIFT, indices, np.float32)
        return with_most_steps(steps, self.max_steps)


AbotWorldStream = StreamModelSetup[AbotWorldConfig, AbotWorldOptions]


def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> AbotWorldStream:
    """Read the family's part of `hf_config` and the serving options. Raises ValueError if either is
    invalid.
    """
    options = AbotWorldOptions.read_options(omni.model)
    stated = dict(checkpoint["transformer"])
    if options.reference_slots is not None:
        stated["ref_num_slots"] = options.reference_slots
    config = AbotWorldConfig.from_checkpoint(stated)
    if options.sink_frames:
        raise ValueError(
            f"omni.model: this model has no sink frames, got sink_frames {options.sink_frames}"
        )
    plan = resolve_chunks(
        options, config, chunk_frames=3, window_frames=WINDOW_FRAMES, sink_frames=0
    )
    return StreamModelSetup(config, options, plan, options.schedule().num_steps)


def space_of(config: AbotWorldConfig) -> ActionSpace:
    """Return the controls and the images that a session accepts."""
    names = REFERENCES[: config.reference_slots]
    images = tuple(NamedImage(name, f"{name} of the character") for name in names)
    return msgspec.structs.replace(SPACE, images=images)
