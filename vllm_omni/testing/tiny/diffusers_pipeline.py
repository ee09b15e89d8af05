# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusers pipelines with random weights in the released layouts: Qwen-Image, FLUX, Wan and
SD3.

The components are instances of the released classes with only a few narrow layers, so that an image
takes a fraction of a second on a CPU. VAEs keep the released compression factors: 8 per side and 4
in time. The generated images are coloured noise.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer

_TEXT_WIDTH = 32
_BLOCKS = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a diffusers pipeline. The weights depend only on the seed."""
    from diffusers.utils import logging

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _LAYOUTS[layout](out)
    _redraw(pipeline.transformer, seed)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        pipeline.save_pretrained(out, safe_serialization=True)
    finally:
        logging.set_verbosity(verbosity)


def _redraw(transformer: torch.nn.Module, seed: int) -> None:
    """Reinitialise the matrices with larger values than the classes use, so that the prompt and the
    guidance affect the result.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5, generator=generator)


def _qwen_image(out: Path) -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _qwen_tokenizer(out / "tokenizer")
    text_encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": _TEXT_WIDTH,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "mrope_section": [1, 1, 2],
                    "rope_type": "default",
                    "rope_theta": 1e6,
                },
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 2048,
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": _TEXT_WIDTH,
                "fullatt_block_indexes": [0],
            },
            image_token_id=len(tokenizer) - 1,
            video_token_id=len(tokenizer) - 2,
        )
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _flux(out: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    clip_tokenizer, clip_config = _clip(out / "tokenizer")
    t5_tokenizer, t5 = _t5(out / "tokenizer_2")
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_autoencoder_kl(),
        text_encoder=CLIPTextModel(clip_config),
        tokenizer=clip_tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_TEXT_WIDTH,
            pooled_projection_dim=_TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _sd3(out: Path) -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    clip_tokenizer, clip_config = _clip(out / "tokenizer")
    clip_tokenizer_2, _ = _clip(out / "tokenizer_2")
    # T5 is as wide as both CLIP encoders together.
    t5_tokenizer, t5 = _t5(out / "tokenizer_3", 2 * _TEXT_WIDTH)
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_autoencoder_kl(),
        text_encoder=CLIPTextModelWithProjection(clip_config),
        tokenizer=clip_tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(clip_config),
        tokenizer_2=clip_tokenizer_2,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
        transformer=SD3Transformer2DModel(
            sample_size=32,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * _TEXT_WIDTH,
            caption_projection_dim=_TEXT_WIDTH,
            pooled_projection_dim=2 * _TEXT_WIDTH,
            pos_embed_max_size=32,
        ),
    )


def _wan(out: Path) -> Any:
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

    vocabulary = write_t5_tokenizer(out / "tokenizer")
    return WanPipeline(
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        tokenizer=AutoTokenizer.from_pretrained(out / "tokenizer"),
        text_encoder=UMT5EncoderModel(
            UMT5Config(
                vocab_size=vocabulary,
                d_model=_TEXT_WIDTH,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
            )
        ),
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            text_dim=_TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        ),
    )


_LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "qwen_image": _qwen_image,
    "flux": _flux,
    "sd3": _sd3,
    "wan": _wan,
}


def _autoencoder_kl() -> Any:
    from diffusers import AutoencoderKL

    down, up = _BLOCKS
    return AutoencoderKL(
        down_block_types=down,
        up_block_types=up,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=16,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _t5(folder: Path, width: int = _TEXT_WIDTH) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    vocabulary = write_t5_tokenizer(folder)
    config = T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    return AutoTokenizer.from_pretrained(folder), T5EncoderModel(config)


def _clip(folder: Path) -> tuple[Any, Any]:
    """Return a CLIP tokenizer (one token per byte, no merges) and the config of a CLIP text
    model.
    """
    from transformers import CLIPTextConfig, CLIPTokenizer

    letters = _byte_letters()
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = _from_vocabulary(CLIPTokenizer, folder, words, {"model_max_length": 77})
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=_TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=_TEXT_WIDTH,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
    )
    return tokenizer, config


def _qwen_tokenizer(folder: Path) -> Any:
    """Return a Qwen2 tokenizer (one token per byte, no merges) with the special tokens of the chat
    template.
    """
    from transformers import Qwen2Tokenizer

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|video_pad|>", "<|image_pad|>")
    tokenizer = _from_vocabulary(
        Qwen2Tokenizer, folder, list(_byte_letters()), {"model_max_length": 4096}
    )
    tokenizer.add_special_tokens({"extra_special_tokens": list(special[1:])})
    assert "<|endoftext|>" in tokenizer.get_vocab()
    return tokenizer


def _from_vocabulary(cls: Any, folder: Path, words: list[str], options: dict[str, Any]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(
        json.dumps({word: index for index, word in enumerate(words)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return cls.from_pretrained(folder, **options)


def _byte_letters() -> list[str]:
    """Return the 256 printable characters that byte-level tokenizers use for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())
