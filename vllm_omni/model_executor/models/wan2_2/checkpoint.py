# SPDX-License-Identifier: Apache-2.0
"""Locates the components of a Wan directory in diffusers' layout, and determines whether this
family serves the directory.

The family serves a directory if its `model_index.json` names `WanPipeline` or
`WanImageToVideoPipeline` and `Wan22Config` supports its transformer. These are the directories of
Wan 2.2 and of Wan 2.1 text-to-video. Wan 2.1 image-to-video has a CLIP image encoder and is served
by diffusers' own pipeline instead. This module only locates files; `weights.py` loads them.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_omni.model_executor.checkpoint.quantization import quantization_of
from vllm_omni.model_executor.checkpoint.tensor_files import read_json
from vllm_omni.model_executor.models.wan.checkpoint.layout import WanComponents
from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES
from vllm_omni.model_executor.models.wan2_2.config import Kind, Wan22Checkpoint, Wan22Config

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
_VAE_DEFAULTS = {"z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4}


@dataclass(frozen=True)
class Wan22Layout(WanComponents):
    """Components of a checkpoint with one or two transformers."""

    download_name: ClassVar[str] = "wan2_2"
    """Name that `vllm-omni download` uses for the family's release."""

    transformer_2: Path | None
    """Folder of the second expert, or None if there is only one transformer."""
    index: dict[str, Any]
    """Content of `model_index.json`."""

    def transformers(self) -> dict[str, Path]:
        """Return the folder of each transformer, keyed by the transformer's name."""
        second = {} if self.transformer_2 is None else {"transformer_2": self.transformer_2}
        return {"transformer": self.transformer, **second}

    def transformer_config(self) -> dict[str, Any]:
        return read_json(self.transformer / "config.json")

    def vae_values(self) -> dict[str, Any]:
        """Return the stored arguments of diffusers' `AutoencoderKLWan`.

        Raises:
            ValueError: The config is missing or invalid.
        """
        if self.vae is None or not self.vae.is_dir():
            raise ValueError(f"{self.root} lacks the folder vae/ with a config.json")
        stored = read_json(self.vae / "config.json")
        if stored.get("_class_name") != "AutoencoderKLWan":
            raise ValueError(
                f"{self.vae}/config.json has _class_name {stored.get('_class_name')!r}"
            )
        return {key: value for key, value in stored.items() if not key.startswith("_")}

    def scheduler_values(self) -> dict[str, Any]:
        """Return the scheduler's config, including `_class_name`.

        Raises:
            ValueError: The scheduler is not supported.
        """
        values = read_json(self.root / "scheduler" / "scheduler_config.json")
        if values.get("_class_name") not in SCHEDULERS:
            raise ValueError(
                f"{self.root}/scheduler has _class_name {values.get('_class_name')!r}; allowed: "
                f"{', '.join(SCHEDULERS)}"
            )
        return values

    def info(self) -> Wan22Checkpoint:
        """Return the fields of `Wan22Checkpoint`, read from the index, the VAE and the
        transformers.

        Raises:
            ValueError: The components are inconsistent with each other.
        """
        vae = {**_VAE_DEFAULTS, **self.vae_values()}
        kind: Kind = "t2v"
        if self.index.get("expand_timesteps") is True:
            kind = "ti2v"
        elif self.index["_class_name"] == "WanImageToVideoPipeline":
            kind = "i2v"
        ratio = self.index.get("boundary_ratio")
        if (ratio is None) != (self.transformer_2 is None):
            raise ValueError(
                f"{self.root}/model_index.json: boundary_ratio {ratio} and transformer_2 "
                f"{'absent' if self.transformer_2 is None else 'present'}; two experts need both, "
                "one network neither"
            )
        info = Wan22Checkpoint(
            kind=kind,
            boundary_ratio=None if ratio is None else float(ratio),
            z_dim=int(vae["z_dim"]),
            spatial_factor=int(vae["scale_factor_spatial"]),
            temporal_factor=int(vae["scale_factor_temporal"]),
        )
        config = Wan22Config.from_checkpoint(self.transformer_config())
        if (config.in_channels, config.out_channels) != (info.in_channels, info.z_dim):
            raise ValueError(
                f"{self.root}: a {kind} transformer over this VAE has {info.in_channels} "
                "channels in and "
                f"{info.z_dim} out, this one {config.in_channels} and {config.out_channels}"
            )
        if self.transformer_2 is not None:
            second = Wan22Config.from_checkpoint(read_json(self.transformer_2 / "config.json"))
            if second != config:
                raise ValueError(
                    f"{self.root}: transformer and transformer_2 have different architectures"
                )
        return info


def find_layout(path: Path) -> Wan22Layout:
    """Locate the checkpoint components in `path`.

    Raises:
        ValueError: This model family cannot serve the directory. The message is a single line.
    """
    index = read_json(path / "model_index.json")
    if index.get("_class_name") not in PIPELINES:
        raise ValueError(
            f"{path} is a {index.get('_class_name')!r}; this model serves {' and '.join(PIPELINES)}"
        )
    if _named(index, "image_encoder"):
        raise ValueError(
            f"{path} conditions on a CLIP image encoder (Wan 2.1 image-to-video), which is left to "
            "diffusers"
        )
    if not (path / "transformer" / "config.json").is_file():
        raise ValueError(f"{path} lacks transformer/config.json")
    second = path / "transformer_2" if _named(index, "transformer_2") else None
    return Wan22Layout.of_folder(path, path / "transformer", transformer_2=second, index=index)


def is_checkpoint(path: Path) -> bool:
    """Return whether this family serves the directory `path`. The check is cheap and never
    raises.
    """
    try:
        Wan22Config.from_checkpoint(find_layout(path).transformer_config())
    except (ValueError, OSError):
        return False
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return the fields of vLLM's config object for this checkpoint, as JSON types.

    The directory need not contain weight files. In addition to the keys that vLLM reads, the result
    has a `wan2_2` key. Its value contains the configs of `transformer`, `vae`, `umt5` and
    `scheduler`, and the fields of `Wan22Checkpoint`.

    Raises:
        ValueError: A component is missing or not supported.
    """
    layout = find_layout(path)
    transformer, info = layout.transformer_config(), layout.info()
    config = Wan22Config.from_checkpoint(transformer)
    text = layout.text_config()
    if text["d_model"] != config.text_dim:
        raise ValueError(
            f"{path}: the text encoder gives rows of {text['d_model']}, the transformer takes "
            f"{config.text_dim}"
        )
    return {
        "architectures": ["Wan22Pipeline"],
        "dtype": stored_dtype(layout),
        "hidden_size": config.dim,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": 16,
        **quantization_of(layout.transformers(), TRANSFORMER_RULES),
        "wan2_2": {
            "transformer": transformer,
            "vae": layout.vae_values(),
            "umt5": text,
            "scheduler": layout.scheduler_values(),
            "facts": vars(info),
        },
    }


def stored_dtype(layout: Wan22Layout) -> str:
    """Return the dtype in the transformer's config or, failing that, in the text encoder's config.
    The default is bfloat16.

    The published transformers are stored in fp32 but run in bf16. Their configs specify no dtype,
    whereas the text encoder's config specifies bf16.
    """
    configs = [layout.transformer_config()]
    if layout.text_encoder is not None and (layout.text_encoder / "config.json").exists():
        configs.append(read_json(layout.text_encoder / "config.json"))
    named = [values.get("dtype") or values.get("torch_dtype") for values in configs]
    return next((str(name) for name in named if name), "bfloat16")


def check_vae_keys(values: dict[str, Any]) -> None:
    """Raise ValueError if `values` contains keys that diffusers' `AutoencoderKLWan` does not
    accept.
    """
    from diffusers import AutoencoderKLWan

    known = set(inspect.signature(AutoencoderKLWan.__init__).parameters) - {"self"}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"VAE config has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )


def _named(index: dict[str, Any], component: str) -> bool:
    """Return whether the index contains `component` with a value other than null."""
    value = index.get(component)
    return isinstance(value, list) and len(value) == 2 and value[0] is not None
