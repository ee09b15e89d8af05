# SPDX-License-Identifier: Apache-2.0
"""Tiny Lance checkpoints with random weights in the released layout.

A tensor's values depend only on the seed and the tensor's name. Sizes are divisible by 2, so that
tensor parallelism works. The weights are scaled so that the prompt, the reference image, the seed
and the step change the result visibly.
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from vllm_omni.model_executor.models.lance.checkpoint import (
    IMAGE_FOLDER,
    LAYOUTS,
    VIDEO_FOLDER,
    VISION_FOLDER,
)
from vllm_omni.model_executor.models.lance.config import LanceConfig, VisionConfig
from vllm_omni.model_executor.models.lance.network.transformer import LancePositionEmbedding3D
from vllm_omni.model_executor.models.lance.weights import (
    BUNDLED_VISION,
    POSITIONS,
    network_shapes,
    vision_shapes,
)
from vllm_omni.testing.tiny.wan import (
    VAE_2_2,
    Tensors,
    normal,
    random_tensors,
    save_tensors,
    start_folder,
    write_component,
    write_original_vae,
)

VIDEO_LATENT_FRAMES = 5
"""Maximum number of latent frames that the tiny video decoder supports: enough for clips of up to
17 frames.
"""

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen2.5's special tokens in the order of their ids. The ids of special tokens follow those of the
256 bytes.
"""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Regular expression that Qwen2.5's tokenizer uses to split text into words."""

_VISION = {
    "depth": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    if layout in ("image", "repository"):
        _write_decoder(out / IMAGE_FOLDER, seed, frames=1)
    if layout in ("video", "repository"):
        _write_decoder(out / VIDEO_FOLDER, seed, frames=VIDEO_LATENT_FRAMES)
    if layout in ("image", "repository"):  # `video` bundles its own tower
        folder = out / VISION_FOLDER
        write_component(folder, {"model_type": "qwen2_5_vl", **_VISION}, "config.json")
        save_tensors(_vision_tensors(seed), folder / "vit.safetensors")
    write_original_vae(out, seed, VAE_2_2)
    directories = [folder for folder in (IMAGE_FOLDER, VIDEO_FOLDER) if (out / folder).is_dir()]
    root = {"model_name": "Lance", "checkpoint_directories": directories}
    write_component(out, root, "config.json")


def _write_decoder(folder: Path, seed: int, frames: int) -> None:
    folder.mkdir(parents=True)
    special = write_tokenizer(folder)
    llm = {
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "vocab_size": 288,
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "vision_token_id": special["<|vision_pad|>"],
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "vision_config": _VISION,
    }
    write_component(folder, llm, "llm_config.json")
    generation = {"eos_token_id": special["<|im_end|>"], "do_sample": False}
    write_component(folder, generation, "generation_config.json")
    config = LanceConfig.from_checkpoint(llm, _VISION, max_latent_frames=frames)
    tensors = _network_tensors(config, seed)
    if folder.name == VIDEO_FOLDER:
        tensors |= {
            f"{BUNDLED_VISION}{name}": tensor for name, tensor in _vision_tensors(seed).items()
        }
        write_component(folder, {"tokenizer_class": "Qwen2Tokenizer"}, "tokenizer_config.json")
    save_tensors(tensors, folder / "model.safetensors")


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer with one token per byte and the special tokens of Qwen2.5.

    Returns:
        The ids of the special tokens, keyed by token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {
        symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_component(folder, vocabulary, "vocab.json")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return {token: len(vocabulary) + number for number, token in enumerate(_SPECIAL)}


def _network_tensors(config: LanceConfig, seed: int) -> Tensors:
    shapes = dict(network_shapes(config))
    del shapes[POSITIONS]
    tensors = random_tensors(shapes, seed, gains={"lm_head.weight": 2.0})
    for name in tensors:
        if "embed_tokens" in name:
            tensors[name] = normal(name, shapes[name], seed)
    size, frames = config.max_latent_size, config.max_latent_frames
    table = LancePositionEmbedding3D(config.hidden_size, frames, size).rows(frames, size, size)
    return tensors | {POSITIONS: table}


def _vision_tensors(seed: int) -> Tensors:
    return random_tensors(vision_shapes(VisionConfig.from_dict(_VISION)), seed, norms="norm|ln_q")
