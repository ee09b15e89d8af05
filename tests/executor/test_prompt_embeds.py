# SPDX-License-Identifier: Apache-2.0
"""A request that sends prompt embeddings gets the same image as a request that sends the prompt as
text.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers_direct import direct
from helpers.scheduling import new_request, run_to_end

from vllm_omni.executor.pipeline_runner import PipelineRunner
from vllm_omni.model_executor.models.diffusers_pipeline import qwen_image

SMALL = {"height": 32, "width": 48, "num_inference_steps": 2}
PROMPT = "a red fox under 三 trees {not a field}"


def states_of(path: Path, prompt: str) -> torch.Tensor:
    """Return the hidden states that an autoregressive engine would return: those of the last layer,
    after the final norm. Shape: [L, D].
    """
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path / "text_encoder")
    tokens = tokenizer(qwen_image.templated(prompt), return_tensors="pt")
    with torch.inference_mode():
        return model.model(**tokens).last_hidden_state[0].clone()


def test_template_and_offset_equal_those_of_the_pipeline(
    tiny_pipelines: Callable[[str], Path],
) -> None:
    """The prompt template and offset are the same as in the diffusers pipeline. Braces in a prompt
    are ordinary text.
    """
    import diffusers

    pipeline = diffusers.QwenImagePipeline.from_pretrained(tiny_pipelines("qwen_image"))
    assert qwen_image.templated(PROMPT) == pipeline.prompt_template_encode.replace("{}", PROMPT)
    assert pipeline.prompt_template_encode_start_idx == qwen_image.DROPPED_TOKENS
    assert pipeline.tokenizer_max_length == qwen_image.MAX_PROMPT_TOKENS


@pytest.mark.parametrize("without", [[], ["text_encoder", "tokenizer"]])
def test_embeddings_equal_the_text(
    make_runner: Callable[..., PipelineRunner],
    tiny_pipelines: Callable[[str], Path],
    without: list[str],
) -> None:
    """Positive and negative embeddings yield the same image as text, bit for bit, whether or not a
    text encoder is loaded.
    """
    path = tiny_pipelines("qwen_image")
    positive = qwen_image.prompt_embeds(states_of(path, PROMPT))
    negative = {
        f"negative_{name}": tensor
        for name, tensor in qwen_image.prompt_embeds(states_of(path, "rain")).items()
    }
    runner = make_runner(without=without)
    guided = new_request(
        "a",
        {**positive, **negative},
        session_id="a",
        one_shot=True,
        prompt="",
        seed=4,
        guidance_scale=3.0,
        **SMALL,
    )
    got = run_to_end(runner, guided)["a"]
    expected = direct(path, 4, prompt=PROMPT, negative_prompt="rain", true_cfg_scale=3.0, **SMALL)
    assert torch.equal(got[1]["images"], expected)


def test_text_without_a_text_encoder_is_refused(
    make_runner: Callable[..., PipelineRunner],
) -> None:
    """If no text encoder is loaded, a text prompt is refused, and the error names the tensors that
    the client must send instead.
    """
    runner = make_runner(without=["text_encoder", "tokenizer"])
    failure = run_to_end(runner, new_request("a", session_id="a", prompt="a fox", **SMALL))["a"]
    assert failure.code == "invalid_request" and "prompt_embeds" in failure.message


def test_too_few_states_are_refused() -> None:
    """Hidden states that contain only the template's tokens are rejected."""
    with pytest.raises(ValueError, match="more than 34 tokens"):
        qwen_image.prompt_embeds(torch.zeros(34, 8))
