# SPDX-License-Identifier: Apache-2.0
"""A tiny random Qwen2-VL in the Hugging Face Transformers layout, and a check of its hidden
states.
"""

from pathlib import Path
from typing import Any

import torch
from ar_engine import params, running_llm, states_of
from PIL import Image

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>a red house"


def write_tiny_qwen2_vl(out: Path) -> Path:
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import (
        Qwen2Tokenizer,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    symbols = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[])
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(name, special=True) for name in _SPECIAL[1:]]}
    )
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "vocab_size": len(symbols),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 2,
            "hidden_size": 64,
            "mlp_ratio": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(out)
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
    )
    processor.save_pretrained(out)
    return out


def check_image_request(model: Path, tolerance: float = 1e-4, **engine_args: Any) -> None:
    """Check that hidden states of requests with and without an image match those of Hugging Face
    Transformers.

    Two requests contain an image, and one of them asks for no hidden states. A third request
    contains no image. `tolerance` is both the absolute and the relative tolerance for fp32 values.
    """
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    image = Image.linear_gradient("L").resize((84, 56)).convert("RGB")
    engine_args |= {
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
    }
    with running_llm(model, **engine_args) as llm:
        with_image = {"prompt": _PROMPT, "multi_modal_data": {"image": image}}
        outputs = llm.generate(
            [with_image, with_image, {"prompt": "a blue house"}],
            [params("all"), params(None), params("all")],
            use_tqdm=False,
        )
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    processor = AutoProcessor.from_pretrained(model)
    reference = Qwen2VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    inputs = processor(text=[_PROMPT], images=[image], return_tensors="pt")
    states = states_of(outputs[0])
    assert inputs["input_ids"][0].tolist() == outputs[0].prompt_token_ids
    generated = torch.tensor([list(outputs[0].outputs[0].token_ids)[:-1]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], generated], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(generated)], dim=1)
    with torch.no_grad():
        expected = reference(**inputs, output_hidden_states=True).hidden_states[-1][0]
        assert states.token_ids.tolist() == inputs["input_ids"][0].tolist()
        torch.testing.assert_close(states[-1], expected, atol=tolerance, rtol=tolerance)
        text_ids = states_of(outputs[2]).token_ids[None]
        expected = reference(input_ids=text_ids, output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(states_of(outputs[2])[-1], expected, atol=tolerance, rtol=tolerance)
