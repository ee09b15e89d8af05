# SPDX-License-Identifier: Apache-2.0
"""Tiny Waypoint checkpoints with random weights in both released layouts.

A tensor's values depend only on the seed and the tensor's name. Sizes are divisible by 2, so that
tensor parallelism works. The weights are scaled so that the keys and the mouse change the frames
visibly, and so that the values remain finite in long sessions.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import UMT5Config

from vllm_omni.model_executor.checkpoint.loading import Rules, rename, shapes_of
from vllm_omni.model_executor.models.waypoint.autoencoders import (
    ImageDecoder,
    ImageEncoder,
    StreamingTAEHV,
)
from vllm_omni.model_executor.models.waypoint.checkpoint import (
    CONFIG_FILE,
    IMAGES_FOLDER,
    LAYOUTS,
    TAEHV_FILES,
    TEXT_FOLDER,
    WEIGHTS_FILE,
    transformer_shapes,
)
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer
from vllm_omni.testing.tiny.wan import (
    TEXT,
    Tensors,
    random_tensors,
    save_tensors,
    start_folder,
    text_tensors,
    write_component,
)

_COMMON: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "mlp_ratio": 2,
    "patch": [2, 2],
    "height": 2,
    "width": 4,
    "tokens_per_frame": 8,
    "local_window": 3,
    "global_window": 8,
    "global_pinned_dilation": 4,
    "global_attn_period": 4,
    "noise_conditioning": "wan",
    "n_buttons": 256,
    "ctrl_conditioning": "mlp_fusion",
    "ctrl_conditioning_period": 3,
    "base_fps": 15,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "v1_5": {
        **_COMMON,
        "model_type": "waypoint-1.5",
        "channels": 8,
        "global_attn_offset": -1,
        "value_residual": True,
        "scheduler_sigmas": [1.0, 0.9, 0.75, 0.3, 0.0],
        "inference_fps": 60,
        "temporal_compression": 4,
        "taehv_ae": True,
    },
    "v1": {
        **_COMMON,
        "model_type": "waypoint-1",
        "channels": 4,
        "height": 16,
        "width": 16,
        "tokens_per_frame": 256,
        "gated_attn": True,
        "base_fps": 60,
        "prompt_conditioning": "cross_attention",
        "prompt_conditioning_period": 3,
        "prompt_embedding_dim": TEXT["d_model"],
    },
}
"""Contents of `config.yaml` for each layout."""
_IMAGES = {"latent_channels": 4, "ch_0": 16, "ch_max": 16, "channels": 3}
_TAEHV = {"encoder_width": 8, "decoder_widths": (16, 8, 8, 8)}

_ENGINE: Rules = (
    (r"^blocks\.", "transformer.blocks."),
    (r"^(denoise_step_emb|ctrl_emb)\.", r"\1.mlp."),
    (r"^out_norm\.", "out_norm.fc."),
    (r"\.(attn|cross)\.([qkv])\.", r".\1.\2_proj."),
    (r"\.cross\.", ".prompt_cross_attn."),
)
_RELEASED: Rules = (
    *_ENGINE,
    (r"\.mlp\.(fc[12])\.weight\Z", r".dit_mlp.\1.weight"),
    (r"^(denoise_step_emb|ctrl_emb)\.dit_mlp\.", r"\1.mlp."),
    (r"\.control\.", ".ctrl_mlpfusion."),
    (r"\.attn_bias\Z", ".attn_cond_head.bias_in"),
    (r"\.mlp_bias\Z", ".mlp_cond_head.bias_in"),
)


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    values = CONFIGS[layout]
    (out / CONFIG_FILE).write_text(yaml.safe_dump(values))
    config = WaypointConfig.from_checkpoint(values)
    tensors = _random_tensors(transformer_shapes(config), seed)
    stored = _released(tensors, config) if layout == "v1_5" else _engine(tensors, config)
    save_tensors({name: tensor.contiguous() for name, tensor in stored.items()}, out / WEIGHTS_FILE)
    if layout == "v1_5":
        with torch.device("meta"):
            shapes = shapes_of(StreamingTAEHV(config.channels, **_TAEHV))  # type: ignore[arg-type]
        torch.save(_random_tensors(shapes, seed), out / TAEHV_FILES[0])
        return
    _write_images(out / IMAGES_FOLDER, seed)
    write_component(
        out / TEXT_FOLDER, UMT5Config(**TEXT, dtype="bfloat16").to_diff_dict(), "config.json"
    )
    save_tensors(text_tensors(seed), out / TEXT_FOLDER / "model.safetensors")
    write_t5_tokenizer(out / TEXT_FOLDER)


def _write_images(folder: Path, seed: int) -> None:
    folder.mkdir(exist_ok=True)
    sizes = (_IMAGES["latent_channels"], _IMAGES["ch_0"], _IMAGES["ch_max"])
    for half, make in (("encoder", ImageEncoder), ("decoder", ImageDecoder)):
        with torch.device("meta"):
            shapes = shapes_of(make(*sizes))
        conf = {"model": {**_IMAGES, f"{half}_blocks_per_stage": [1, 1, 1, 1]}}
        (folder / f"{half}_conf.yml").write_text(yaml.safe_dump(conf))
        save_tensors(_random_tensors(shapes, seed), folder / f"{half}.safetensors")


def _random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    # `original0` is the norm of a channel's weights
    ones = {name: torch.ones(s) for name, s in shapes.items() if name.endswith("original0")}
    return random_tensors(shapes, seed, norms=r"(?!)") | ones


def _per_block(tensors: Tensors, config: WaypointConfig, name_of: Any) -> Tensors:
    """Return the six modulation projections of each block as separate tensors.

    Args:
        tensors: Tensors of the model.
        config: Architecture of the model.
        name_of: Function that returns the stored name for a block and the index of a projection.
    """
    return {
        name_of(block, index): tensors[f"cond_proj.{index}.weight"].clone()
        for block in range(config.n_layers)
        for index in range(6)
    }


def _released(tensors: Tensors, config: WaypointConfig) -> Tensors:
    """Return the tensors in the format of the Waypoint 1.5 release."""
    stored = {
        rename(name, _RELEASED): t
        for name, t in tensors.items()
        if not name.startswith("cond_proj.")
    }
    cells = math.prod(config.patch)
    stored["unpatchify.weight"] = (
        stored["unpatchify.weight"].unflatten(0, (-1, *config.patch)).permute(3, 0, 1, 2)
    )
    stored["unpatchify.bias"] = stored["unpatchify.bias"][::cells]
    stored["ctrl_cfg.null_emb"] = torch.zeros(1, 1, config.d_model)
    heads = ("attn", "mlp")
    return stored | _per_block(
        tensors,
        config,
        lambda n, j: f"transformer.blocks.{n}.{heads[j // 3]}_cond_head.cond_proj.{j % 3}.weight",
    )


def _engine(tensors: Tensors, config: WaypointConfig) -> Tensors:
    """Return the tensors in the format of the Waypoint 1 release.

    Each block has one modulation bias, and the two halves of each fusion's first layer are stored
    as one tensor.
    """
    stored = {}
    for name, tensor in tensors.items():
        target = rename(name, _ENGINE)
        if name.startswith("cond_proj.") or name.endswith(("fc1_c.weight", "attn_bias")):
            continue
        if name.endswith("fc1_x.weight"):
            tensor = torch.cat((tensor, tensors[name.replace("fc1_x", "fc1_c")]), dim=1)
        target = target.replace(".control.fc1_x.", ".ctrl_mlpfusion.mlp.fc1.").replace(
            ".mlp_bias", ".cond_head.bias_in"
        )
        stored[target.replace(".control.", ".ctrl_mlpfusion.mlp.")] = tensor
    return stored | _per_block(
        tensors, config, lambda n, j: f"transformer.blocks.{n}.cond_head.cond_proj.{j}.weight"
    )
