# SPDX-License-Identifier: Apache-2.0
"""`DiffusersOptions`: a deployment's options of a diffusers pipeline, under `omni.model`.

Frozen, parsed once where the executor starts and once by the command line's early check; unknown
keys and values out of range are errors. Held by
tests/model_executor/models/diffusers_pipeline/test_diffusers_checkpoint.py.
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
    """One LoRA adapter: a directory (or one `.safetensors` file), the file in it if there are
    several, its strength.
    """

    path: str
    weight_name: str | None = None
    scale: float = 1.0


class RequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Defaults of requests that are no argument of every pipeline; None = the pipeline's own."""

    width: Pixels | None = None
    height: Pixels | None = None
    num_frames: Positive | None = None
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 16.0
    prompt_suffix: Literal["off", "auto"] = "off"


class DiffusersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one served pipeline.

    pipeline_class: run the directory's components with another class of diffusers, e.g. an
    image-to-image or inpainting pipeline. without: components not to load (`["text_encoder",
    "tokenizer"]` when clients send `prompt_embeds`).
    component_dtypes: dtypes that differ from `--dtype`, by component (`{"vae": "float32"}`).
    variant: weight files with this infix (`fp16`).
    offload: `model` or `sequential` keep weights on the host and bring them to the accelerator in
    turn (accelerate).
    vae_tiling: decode in overlapping tiles, and one picture at a time, for less memory (not exact).
    attention_backend: diffusers' name of one.
    interleave: requests that may be between two of their denoise steps at once; their steps take
    turns.
    defaults: of requests: width, height, num_frames, fps (16), prompt_suffix (`auto` adds the
    quality phrase that the model's authors recommend for the prompt's language) and further
    arguments of the pipeline's `__call__` (`{"true_cfg_scale": 4.0, "negative_prompt": " "}`).
    max_pixels: the largest picture (None: 2048x2048, 1280x720 for videos). max_num_frames: the
    longest video of a request.
    max_num_inference_steps: the most steps of a request. loras: adapters by the name requests use.
    """

    pipeline_class: str | None = None
    without: tuple[str, ...] = ()
    component_dtypes: dict[str, Dtype] = msgspec.field(default_factory=dict)
    variant: str | None = None
    offload: Literal["none", "model", "sequential"] = "none"
    vae_tiling: bool = False
    attention_backend: str | None = None
    interleave: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    max_pixels: Positive | None = None
    max_num_frames: Positive = 257
    max_num_inference_steps: Positive = 200
    loras: dict[AdapterName, LoraSource] = msgspec.field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "DiffusersOptions":
        """Raises ValueError with the key and the allowed values."""
        parsed = parse_options(cls, options, "additional_config['omni']['model']")
        if parsed.interleave > 1 and parsed.offload != "none":
            raise ValueError(
                f"omni.model.interleave {parsed.interleave} needs omni.model.offload 'none': "
                "offloading moves weights "
                "out from under a request that is between two steps"
            )
        parsed.request_defaults()
        for name, source in parsed.loras.items():
            if not Path(source.path).exists():
                raise ValueError(f"omni.model.loras.{name}: {source.path} does not exist")
        return parsed

    def request_defaults(self) -> RequestDefaults:
        """Those of `defaults` that this package reads. Raises ValueError with the allowed ones."""
        own = {
            name: value
            for name, value in self.defaults.items()
            if name in RequestDefaults.__struct_fields__
        }
        return parse_options(RequestDefaults, own, "omni.model.defaults")

    def call_defaults(self) -> dict[str, Any]:
        """Those of `defaults` that are arguments of the pipeline."""
        return {
            name: value
            for name, value in self.defaults.items()
            if name not in RequestDefaults.__struct_fields__
        }
