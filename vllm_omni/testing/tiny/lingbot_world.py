# SPDX-License-Identifier: Apache-2.0
"""Tiny LingBot World checkpoints with random weights in all released layouts.

A tensor's values depend only on the seed and the tensor's name, so for a given seed, all layouts
contain the same model. The exceptions are `v2_1_3b`, whose heads must have the released size, and
`act` and `world`, which have different controls. The `world` layout also contains a world
description, start images and an occupancy grid. Sizes are divisible by 2, and most of them by 4, so
that the model can run on several ranks. The weights are scaled so that each input (camera, prompt,
condition) changes the frames visibly and the values remain finite in long sessions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image

from vllm_omni.model_executor.models.lingbot_world.checkpoint import LAYOUTS
from vllm_omni.model_executor.models.lingbot_world.config import ControlType, LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.weights import transformer_shapes
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import ASSETS_FOLDER, TINY_VAE_FILE
from vllm_omni.testing.tiny.wan import (
    Tensors,
    random_tensors,
    start_folder,
    write_component,
    write_diffusers_components,
    write_original_components,
    write_shards,
    write_tiny_vae,
)
from vllm_omni.worlds.description import CARD, StartImage, WorldDescription, WorldGrid, WorldPrompt
from vllm_omni.worlds.grid import OccupancyGrid

_SIZES = {
    "ffn_dim": 112,
    "freq_dim": 32,
    "text_dim": 32,
    "text_len": 64,
    "num_layers": 4,
    "eps": 1e-6,
}
_WINDOW = {"sliding_window_num_frames": 18, "num_frames_per_block": 3}
_SMALL = {
    "dim": 256,
    "num_heads": 2,
    "num_layers": 2,
    "ffn_dim": 112,
    "freq_dim": 32,
    "text_dim": 32,
}
"""Sizes of the layout that has no `config.json`. Heads must have 128 channels in this layout,
because the loader derives the sizes from the tensors.
"""
_WORLD_SIDE_M, _WORLD_WIDTH, _WORLD_HEIGHT = 20.0, 48, 32
_ORIGINAL = {
    "_class_name": "WanModelFast",
    "model_type": "i2v",
    "control_type": "cam",
    "dim": 64,
    "num_heads": 4,
    "in_dim": 36,
    "out_dim": 16,
    **_SIZES,
    **_WINDOW,
    "dtype": "float32",
}


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    write_tiny_vae(out / TINY_VAE_FILE, seed)
    if layout == "diffusers":
        _write_diffusers(out, seed)
    elif layout == "v2_1_3b":
        write_original_components(out / ASSETS_FOLDER, seed)
        write_shards(
            out, _transformer_tensors(LingBotWorldConfig.from_checkpoint(_SMALL), seed), "model"
        )
    else:
        controls: dict[str, ControlType] = {"act": "act", "world": "world"}
        folders = {
            "v2": "transformers",
            "world": "transformers",
            "v2_pretrain": "transformer_causal",
        }
        _write_original(
            out, seed, folders.get(layout, "lingbot_world_fast"), controls.get(layout, "cam")
        )
        if layout == "world":
            _write_world(out, seed)


def write_random_world(
    out: Path, seed: int, sizes: Mapping[str, Any], vae: VAEConfig, tiny_vae_channels: Sequence[int]
) -> None:
    """Write a checkpoint with random weights and the given sizes, in the original layout.

    Args:
        out: Directory to write the checkpoint to.
        seed: Seed of the weights.
        sizes: Changes to the transformer's configuration.
        vae: Configuration of the VAE.
        tiny_vae_channels: Number of channels of each of the tiny decoder's layers.
    """
    write_original_components(out, seed, vae)
    write_tiny_vae(out / TINY_VAE_FILE, seed, tiny_vae_channels)
    _write_transformer(out / "lingbot_world_fast", {**_ORIGINAL, "sink_size": 9, **sizes}, seed)


def _write_original(out: Path, seed: int, transformer: str, control: ControlType) -> None:
    write_original_components(out, seed)
    config = {
        **_ORIGINAL,
        "control_type": control,
        "sink_size": 9 if transformer == "lingbot_world_fast" else 6,
    }
    if control == "world":
        config["world_period_m"] = _WORLD_SIDE_M
    if transformer == "transformer_causal":
        config["_class_name"] = "WanModelCausal"
    _write_transformer(out / transformer, config, seed)


def _write_world(out: Path, seed: int) -> None:
    """Write `world.json`, two start images of noise, and an occupancy grid with a wall."""
    generator = torch.Generator().manual_seed(seed)
    starts = []
    for name, z_m in (("middle", 0.0), ("south", -4.0)):
        coarse = torch.rand(1, 3, 4, 6, generator=generator)
        pixels = torch.nn.functional.interpolate(
            coarse, (_WORLD_HEIGHT, _WORLD_WIDTH), mode="bilinear"
        )[0]
        image = (255 * pixels).byte().permute(1, 2, 0).numpy()
        Image.fromarray(image).save(out / f"{name}.png")
        starts.append(
            StartImage(
                name=name, prompt="day", file=f"{name}.png", x_m=0.0, z_m=z_m, heading_degrees=0.0
            )
        )
    cells = torch.zeros(200, 200, dtype=torch.bool)
    cells[50:70] = True  # the wall extends from z = 3 m to z = 5 m
    OccupancyGrid(cells, _WORLD_SIDE_M).write(out / "grid.png")
    description = WorldDescription(
        domain="tiny",
        title="Tiny world",
        about="Noise, with poses.",
        sizes=((_WORLD_WIDTH, _WORLD_HEIGHT),),
        metres_per_unit=10.0,
        prompts=(WorldPrompt("day", "a day"),),
        starts=tuple(starts),
        focal=0.65,
        grid=WorldGrid(file="grid.png", side_m=_WORLD_SIDE_M),
    )
    write_component(out, msgspec.to_builtins(description), CARD)


def _write_diffusers(out: Path, seed: int) -> None:
    write_diffusers_components(out, seed, flow_shift=10.0)
    config = {
        "_class_name": "CausalLingBotWorldTransformer3DModel",
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "in_channels": 36,
        "out_channels": 16,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "rope_max_seq_len": 1024,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        "local_attn_size": -1,
        **_SIZES,
        **_WINDOW,
        "sink_size": 9,
        "dtype": "float32",
    }
    _write_transformer(out / "transformer", config, seed)
    index = {
        "_class_name": "LingBotWorldCausalDMDPipeline",
        "boundary_ratio": 0.9,
        "image_encoder": [None, None],
        "image_processor": [None, None],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "CausalLingBotWorldTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    write_component(out, index, "model_index.json")


def _write_transformer(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    write_component(folder, config, "config.json")
    tensors = _transformer_tensors(LingBotWorldConfig.from_checkpoint(config), seed)
    write_shards(folder, tensors)


def _transformer_tensors(config: LingBotWorldConfig, seed: int) -> Tensors:
    # The camera multiplies the residual stream in every block, so a smaller gain keeps the residual
    # stream in range.
    return random_tensors(transformer_shapes(config), seed, gains={".cam_": 0.4})
