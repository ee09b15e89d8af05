# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen2.5-Omni checkpoints with random weights and with all files, tensor names and config
keys of the released checkpoint.

transformers' own `Qwen2_5OmniForConditionalGeneration` writes the weights. Two unusual proportions
of the released model are preserved: the width of the talker differs from heads x head_dim, and the
talker's token embeddings are wider than its layers. Attention heads have 32 channels, as vLLM's CPU
kernels require.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from vllm_omni.testing.tiny.text_tokenizers import write_qwen_tokenizer

SPEAKERS = ("Chelsie", "Ethan")
_REFERENCE_FRAMES = 60
_CODES = 64
_INITIALIZER_RANGE = 0.12
"""Standard deviation of the weights. The value is large, so that the two best logits differ clearly
and greedy decoding produces the same tokens with all kernels.
"""

_PREPROCESSOR = {
    "chunk_length": 300,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16000,
    "temporal_patch_size": 2,
}


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokens = write_qwen_tokenizer(out)
    config: Any = Qwen2_5OmniConfig(**_config(tokens), architectures=["Qwen2_5OmniModel"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5OmniForConditionalGeneration(config)
        _randomise(model)
        model.save_pretrained(out)
        torch.save(_speakers(tokens, config.token2wav_config.dit_config), out / "spk_dict.pt")
    stored = json.loads((out / "config.json").read_text())
    # The published config has this name, but `save_pretrained` writes the name of its own class.
    stored["architectures"] = ["Qwen2_5OmniModel"]
    (out / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
    (out / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2) + "\n")
    generation = {"eos_token_id": tokens["<|im_end|>"], "pad_token_id": tokens["<|endoftext|>"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _randomise(model: Any) -> None:
    """Draw random values for the layers that `initializer_range` does not affect, so that each
    input changes the result visibly.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.02)
        elif parameter.dim() >= 2 and "token2wav" in name:
            torch.nn.init.normal_(parameter, std=0.5 / parameter[0].numel() ** 0.5)
    # An untrained talker soon emits a control code. All control codes except the one that ends the
    # speech are therefore made unlikely.
    talker = model.talker
    head = talker.codec_head.weight.data
    ends = head[talker.codec_eos_token].clone()
    head[_CODES:] = 0
    head[talker.codec_eos_token] = ends


def _speakers(tokens: dict[str, int], dit: Any) -> dict[str, dict[str, Any]]:
    """Return the content of `spk_dict.pt`.

    Each speaker has a vector, a reference mel spectrogram and the first token of the speech.
    """
    bos = (tokens["<|tts_bos_chelsie|>"], tokens["<tts_text_bos>"])
    return {
        name: {
            "cond": torch.randn(1, dit.enc_emb_dim),
            "ref_mel": torch.randn(1, _REFERENCE_FRAMES, dit.mel_dim),
            "bos_token": bos[index],
        }
        for index, name in enumerate(SPEAKERS)
    }


def _config(tokens: dict[str, int]) -> dict[str, Any]:
    """Return the config as keyword arguments, with the token ids of the tiny tokenizer."""
    rope = {
        "rope_type": "default",
        "type": "default",
        "mrope_section": [4, 6, 6],
        "rope_theta": 1000000.0,
    }
    shared = {
        "audio_token_index": tokens["<|AUDIO|>"],
        "image_token_index": tokens["<|IMAGE|>"],
        "video_token_index": tokens["<|VIDEO|>"],
        "audio_start_token_id": tokens["<|audio_bos|>"],
        "audio_end_token_id": tokens["<|audio_eos|>"],
        "vision_start_token_id": tokens["<|vision_bos|>"],
        "vision_end_token_id": tokens["<|vision_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "initializer_range": _INITIALIZER_RANGE,
    }
    layers = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
        "initializer_range": _INITIALIZER_RANGE,
    }
    codes = _CODES
    return {
        "dtype": "float32",
        "enable_audio_output": True,
        "thinker_config": {
            **shared,
            "user_token_id": tokens["user"],
            "audio_config": {
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 96,
                "num_mel_bins": 128,
                "output_dim": 128,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 96,
                "out_hidden_size": 128,
                "fullatt_block_indexes": [1],
            },
            "text_config": {
                **layers,
                "vocab_size": tokens["<|padding|>"],
                "hidden_size": 128,
                "intermediate_size": 192,
                "tie_word_embeddings": False,
            },
        },
        "talker_config": {
            **shared,
            **layers,
            "vocab_size": codes + 8,
            "tts_text_start_token_id": tokens["<tts_text_bos>"],
            "tts_text_end_token_id": tokens["<tts_text_eod>"],
            "tts_text_pad_token_id": tokens["<tts_pad>"],
            "tts_codec_pad_token_id": codes + 1,
            "tts_codec_start_token_id": codes + 2,
            "tts_codec_end_token_id": codes + 3,
            "tts_codec_mask_token_id": codes + 5,
            "embedding_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 32,
        },
        "token2wav_config": {
            "dit_config": {
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "head_dim": 32,
                "emb_dim": 32,
                "look_ahead_layers": [1],
                "look_backward_layers": [0, 2],
                # The published model has 8193 codes here. The tiny model also has the talker's
                # control codes, because an untrained talker emits them.
                "num_embeds": codes + 8,
                "mel_dim": 16,
                "enc_emb_dim": 24,
                "enc_dim": 16,
                "enc_channels": [16, 16, 16, 16, 48],
                "enc_attention_channels": 8,
                "enc_se_channels": 8,
            },
            "bigvgan_config": {"mel_dim": 16, "upsample_initial_channel": 64},
        },
    }
