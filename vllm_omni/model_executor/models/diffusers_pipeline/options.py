# SPDX-License-Identifier: Apache-2.0
"""`DiffusersOptions`: options under `omni.model` for a served diffusers pipeline. Unknown keys and
out-of-range values are errors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from vllm_omni.config import Positive, parse_options
from vllm_omni.inputs import Pixels

Dtype = Literal["float32", "bfloat16", "float16"]
AdapterName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


class LoraSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One LoRA adapter."""

    path: str
    """Directory that contains the adapter, or a `.safetensors` file."""
    weight_name: str | None = None
    """File name in the directory. Default: the only file in the directory."""
    scale: float = 1.0
    """Strength of the adapter."""


class RequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Request defaults that this package reads itself. All other defaults are pipeline
    arguments.
    """

    width: Pixels | None = None
    """Width in pixels. Default: the pipeline's default."""
    height: Pixels | None = None
    """Height in pixels. Default: the pipeline's default."""
    num_frames: Positive | None = None
    """Number of frames in a video. Default: the pipeline's default."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 16.0
    """Frame rate of a video, in frames per second."""
    prompt_suffix: Literal["off", "auto"] = "off"
    """`auto` adds the quality phrase that the model's authors recommend for the prompt's
    language."""


class DiffusersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for the served pipeline."""

    pipeline_class: str | None = None
    """Diffusers class that runs the components, for example an image-to-image or inpainting
    pipeline. Default: the class in the directory's `model_index.json`.
    """
    without: tuple[str, ...] = ()
    """Components that are not loaded, for example `["text_encoder", "tokenizer"]` if clients send
    `prompt_embeds`."""
    component_dtypes: dict[str, Dtype] = msgspec.field(default_factory=dict)
    """Dtypes of the components that do not use `--dtype`, by component name, for example
    `{"vae": "float32"}`."""
    variant: str | None = None
    """Weight file variant, for example `fp16`. The variant is part of the file names."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Where weights are stored. `none`: on the accelerator. `model` or `sequential`: in host
    memory, from which the accelerate library moves them to the accelerator when they are needed.
    """
    vae_tiling: bool = False
    """Whether the VAE decodes in overlapping tiles, one image at a time. Tiling needs less memory,
    but the result is not exact."""
    attention_backend: str | None = None
    """Name of the diffusers attention backend."""
    interleave: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Maximum number of requests whose denoise steps are interleaved."""
    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    """Default values for requests: `width`, `height`, `num_frames`, `fps` (16), `prompt_suffix`
    (`auto` adds the quality phrase that the model's authors recommend for the prompt's language),
    and arguments of the pipeline's `__call__`, for example `{"true_cfg_scale": 4.0,
    "negative_prompt": " "}`."""
    max_pixels: Positive | None = None
    """Maximum number of pixels in an image or a video frame (`width * height`). Default: 2048x2048
    for images, 1280x720 for videos."""
    max_num_frames: Positive = 257
    """Maximum number of frames in a video."""
    max_num_inference_steps: Positive = 200
    """Maximum number of denoise steps per request."""
    loras: dict[AdapterName, LoraSource] = msgspec.field(default_factory=dict)
    """LoRA adapters, by the names that requests use for them."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "DiffusersOptions":
        """Parse `omni.model`. If a value is invalid, the method raises a ValueError that contains
        the key and the allowed values.
        """
        parsed = parse_options(cls, options, "additional_config['omni']['model']")
        if parsed.interleave > 1 and parsed.offload != "none":
            raise ValueError(
                f"omni.model.interleave {parsed.interleave} needs omni.model.offload 'none', "
                "because offloading moves the weights of requests that are between two steps"
            )
        parsed.request_defaults()
        for name, source in parsed.loras.items():
            if not Path(source.path).exists():
                raise ValueError(f"omni.model.loras.{name}: {source.path} does not exist")
        return parsed

    def request_defaults(self) -> RequestDefaults:
        """Return the defaults that this package reads itself. If a value is invalid, the method
        raises a ValueError that contains the allowed values.
        """
        own = {
            name: value
            for name, value in self.defaults.items()
            if name in RequestDefaults.__struct_fields__
        }
        return parse_options(RequestDefaults, own, "omni.model.defaults")

    def call_defaults(self) -> dict[str, Any]:
        """Return the defaults that are pipeline arguments."""
        return {
            name: value
            for name, value in self.defaults.items()
            if name not in RequestDefaults.__struct_fields__
        }
