# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan 2.2 checkpoints with random weights, written by diffusers' own classes.

`t2v` and `i2v` have two experts, like A14B. `ti2v` has the residual VAE with 2x2 patches and the
per-token timesteps of the 5B model. Sizes are divisible by 2 and 4, so that the models can run on
several ranks. VAEs have their released strides.
"""

from pathlib import Path
from typing import Any

import torch

from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer
from vllm_omni.testing.tiny.wan import TEXT

_BOUNDARIES = {"t2v": 0.875, "i2v": 0.9, "ti2v": None}
_SHIFTS = {"t2v": 3.0, "i2v": 3.0, "ti2v": 5.0}
_TI2V_CHANNELS = 48


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint. The layout is `t2v`, `i2v` or `ti2v`. Weights depend only on the seed."""
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
    from diffusers.utils import logging
    from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

    vocabulary = write_t5_tokenizer(out / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        components: dict[str, Any] = {
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=_SHIFTS[layout]
            ),
            "vae": _vae(layout),
            "tokenizer": AutoTokenizer.from_pretrained(out / "tokenizer"),
            "text_encoder": UMT5EncoderModel(UMT5Config(**{**TEXT, "vocab_size": vocabulary})),
            "transformer": _transformer(layout),
        }
        if _BOUNDARIES[layout] is not None:
            components |= {
                "transformer_2": _transformer(layout),
                "boundary_ratio": _BOUNDARIES[layout],
            }
        for name in ("transformer", "transformer_2"):
            if name in components:
                _redraw(components[name])
    if layout == "i2v":
        pipeline: Any = WanImageToVideoPipeline(
            **components, image_encoder=None, image_processor=None
        )
    else:
        pipeline = WanPipeline(**components, expand_timesteps=layout == "ti2v")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        pipeline.save_pretrained(out, safe_serialization=True)
    finally:
        logging.set_verbosity(verbosity)
    write_t5_tokenizer(out / "tokenizer")  # `save_pretrained` drops the byte fallback


def _transformer(layout: str) -> Any:
    from diffusers import WanTransformer3DModel

    channels = _TI2V_CHANNELS if layout == "ti2v" else 16
    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=36 if layout == "i2v" else channels,
        out_channels=channels,
        text_dim=TEXT["d_model"],
        freq_dim=32,
        ffn_dim=112,
        num_layers=4,
        rope_max_seq_len=64,
    )


def _vae(layout: str) -> Any:
    from diffusers import AutoencoderKLWan

    if layout != "ti2v":
        return AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1)
    statistics = torch.randn(_TI2V_CHANNELS), 0.5 + torch.rand(_TI2V_CHANNELS)
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=_TI2V_CHANNELS,
        num_res_blocks=1,
        latents_mean=statistics[0].tolist(),
        latents_std=statistics[1].tolist(),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


def _redraw(transformer: torch.nn.Module) -> None:
    """Set all parameters to random values, because the classes initialise some of them to zeros or
    ones, and such parameters would not affect the result.
    """
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if parameter.dim() > 1 and "scale_shift" not in name:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
            elif name.endswith("weight"):
                parameter.normal_(mean=1.0, std=0.1)
            else:
                parameter.normal_(std=0.1)
