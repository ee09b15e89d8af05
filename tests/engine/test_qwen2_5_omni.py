# SPDX-License-Identifier: Apache-2.0
"""Tokens, codes and audio of the three Qwen2.5-Omni engines, compared with Hugging Face
Transformers.

The tests also cover aborts and a killed engine.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from helpers.waits import pause_task, seconds
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import SamplingParams

from vllm_omni.composition.composed_engine import ComposedEngineDied
from vllm_omni.composition.speech import AudioChunk, TextDelta
from vllm_omni.model_executor.models.qwen2_5_omni.engines import SpeechEngines
from vllm_omni.model_executor.models.qwen2_5_omni.options import SpeechDefaults, SpeechEngineOptions
from vllm_omni.model_executor.models.qwen2_5_omni.speech import SpeechComposition
from vllm_omni.outputs import RequestFailed

pytestmark = pytest.mark.nightly

SEED = 5
CODES = 40
GREEDY = SpeechDefaults(chunk_codes=0, temperature=0.0, top_k=0, top_p=1.0, max_codes=CODES)
TALKER = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 2}
SAMPLES_PER_CODE = 480

TONE = np.sin(np.arange(16_000, dtype=np.float32) * 0.05)
IMAGE = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8)


@dataclass
class Served:
    """The three engines, and the event loop on which `run` runs coroutines."""

    runner: asyncio.Runner
    engines: SpeechEngines
    path: Path

    @property
    def composition(self) -> SpeechComposition:
        return self.engines.composition

    def run(self, work: Any, timeout_s: float = 60) -> Any:
        return self.runner.run(asyncio.wait_for(work, timeout_s))

    def prompt(self, text: str, **media: Any) -> Any:
        """Render a prompt as vLLM's own server does."""
        engine = self.composition.thinker.engine
        prompt = {"prompt": text, **({"multi_modal_data": media} if media else {})}
        parsed = parse_model_prompt(engine.model_config, prompt)
        (rendered,) = engine.renderer.render_cmpl([parsed], engine.renderer.default_cmpl_tok_params)
        return rendered

    async def reply(
        self, prompt: Any, how: SpeechDefaults, name: str, tokens: int = 16
    ) -> tuple[list[int], list[torch.Tensor]]:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        ids: list[int] = []
        sound: list[torch.Tensor] = []
        async for event in self.composition.respond(prompt, params, name, how, seed=SEED):
            if isinstance(event, TextDelta):
                ids.extend(event.output.outputs[0].token_ids)
            else:
                assert isinstance(event, AudioChunk) and event.sample_rate == 24_000
                sound.append(event.samples)
        return ids, sound


@pytest.fixture(scope="module")
def served(qwen2_5_omni: Path) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        options = SpeechEngineOptions(talker=TALKER, speech={"chunk_codes": 0})
        engines = runner.run(
            SpeechEngines.start_engines(
                qwen2_5_omni,
                options,
                enforce_eager=True,
                max_model_len=256,
                max_num_seqs=4,
                skip_mm_profiling=True,
                limit_mm_per_prompt={"image": 1, "audio": 1, "video": 0},
            )
        )
        yield Served(runner, engines, qwen2_5_omni)
        engines.shutdown()


def chat(body: str) -> str:
    return f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": (chat("Good morning, how are you?"), {}, {}),
    "audio": (
        chat("<|audio_bos|><|AUDIO|><|audio_eos|>What do you hear?"),
        {"audio": (TONE, 16_000)},
        {"audio": [TONE]},
    ),
    "image": (
        chat("<|vision_bos|><|IMAGE|><|vision_eos|>What do you see?"),
        {"image": "PIL"},
        {"images": "PIL"},
    ),
}


@pytest.fixture(scope="module")
def reference(qwen2_5_omni: Path) -> dict[str, tuple[list[int], list[int], torch.Tensor]]:
    """Results of greedy decoding with Hugging Face Transformers for each prompt: reply tokens,
    codes and waveform.
    """
    from PIL import Image
    from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(qwen2_5_omni, dtype=torch.float32)
    processor = Qwen2_5OmniProcessor.from_pretrained(qwen2_5_omni)
    config = model.config.talker_config
    spoken: dict[str, torch.Tensor] = {}
    token2wav = model.token2wav.forward

    def seeded(code: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        spoken["codes"] = code
        torch.manual_seed(SEED)
        return token2wav(code, **kwargs)

    model.token2wav.forward = seeded
    talker = model.talker.generate

    def without_pixels(*args: Any, pixel_values: torch.Tensor | None = None, **kwargs: Any) -> Any:
        # Transformers 5.19 passes the thinker's pixels to the talker, which does not accept this
        # argument.
        return talker(*args, **kwargs)

    model.talker.generate = without_pixels
    responses = {}
    for name, (text, _, media) in PROMPTS.items():
        media = {
            key: Image.fromarray(IMAGE) if value == "PIL" else value for key, value in media.items()
        }
        inputs = processor(text=text, return_tensors="pt", **media)
        ids, wave = model.generate(
            **inputs,
            thinker_max_new_tokens=16,
            thinker_do_sample=False,
            thinker_eos_token_id=processor.tokenizer.eos_token_id,
            talker_max_new_tokens=CODES,
            talker_do_sample=False,
            talker_eos_token_id=[config.tts_codec_pad_token_id, config.tts_codec_end_token_id],
        )
        responses[name] = (
            ids[0, inputs.input_ids.shape[1] :].tolist(),
            spoken["codes"][0].tolist(),
            wave,
        )
    return responses


@pytest.mark.parametrize("name", list(PROMPTS))
def test_tokens_codes_and_sound_equal_transformers(
    served: Served, reference: dict[str, tuple[list[int], list[int], torch.Tensor]], name: str
) -> None:
    """The reply, the number of codes and the waveform match those of Hugging Face Transformers.

    One prompt contains only text, one contains audio, and one contains an image.
    """
    from PIL import Image

    ids, codes, wave = reference[name]
    text, media, _ = PROMPTS[name]
    media = {
        key: Image.fromarray(IMAGE) if value == "PIL" else value for key, value in media.items()
    }
    got_ids, sound = served.run(
        served.reply(served.prompt(text, **media), GREEDY, f"parity-{name}")
    )
    assert got_ids == ids
    assert len(sound) == 1 and len(sound[0]) == len(codes) * SAMPLES_PER_CODE
    assert float(wave.std()) > 1e-3
    # A wrong code would cause an error as large as the audio's amplitude. Kernels in two processes
    # differ only by rounding.
    torch.testing.assert_close(sound[0], wave, atol=2e-4, rtol=0)


def test_concurrent_requests_equal_single_ones(served: Served) -> None:
    """With more concurrent requests than talker slots, each request returns the same audio as when
    it runs by itself.
    """
    prompts = [
        served.prompt(chat(f"Tell me about {word}."))
        for word in ("ships", "rain", "bread", "trains")
    ]
    how = msgspec.structs.replace(GREEDY, max_codes=24)

    async def together() -> Any:
        return await asyncio.gather(
            *(
                served.reply(prompt, how, f"together-{n}", 4 + 3 * n)
                for n, prompt in enumerate(prompts)
            )
        )

    both = served.run(together())
    for number, (ids, sound) in enumerate(both):
        alone_ids, alone = served.run(
            served.reply(prompts[number], how, f"alone-{number}", 4 + 3 * number)
        )
        assert ids == alone_ids
        torch.testing.assert_close(torch.cat(sound), torch.cat(alone), atol=2e-4, rtol=0)


def test_parts_and_text_read_aloud(served: Served) -> None:
    """Together, the streamed audio chunks are as long as the whole clip. Reading a given text aloud
    yields the same audio as a reply with this text.
    """
    prompt = served.prompt(PROMPTS["text"][0])
    ids, clip = served.run(served.reply(prompt, GREEDY, "whole"))
    how = msgspec.structs.replace(
        GREEDY, chunk_codes=2, most_chunk_codes=2, left_codes=4, right_codes=1
    )
    _, sound = served.run(served.reply(prompt, how, "pieces"))
    assert sum(map(len, sound)) == len(clip[0]) and len(sound) == -(
        -len(clip[0]) // (2 * SAMPLES_PER_CODE)
    )

    async def read_aloud() -> torch.Tensor:
        events = served.composition.read_aloud(
            prompt["prompt_token_ids"], ids, "aloud", GREEDY, seed=SEED
        )
        return torch.cat([event.samples async for event in events])

    torch.testing.assert_close(served.run(read_aloud()), clip[0], atol=2e-4, rtol=0)


def test_invalid_requests_are_refused_before_any_engine_runs(served: Served) -> None:
    prompt = served.prompt("x")
    how = msgspec.structs.replace(GREEDY, voice="Unknown")
    with pytest.raises(RequestFailed, match="Chelsie, Ethan"):
        served.run(served.reply(prompt, how, "unknown"))
    with pytest.raises(VLLMValidationError, match="256"):
        served.run(served.reply(served.prompt("word " * 300), GREEDY, "long"))
    assert served.run(served.reply(prompt, GREEDY, "after"))


def test_a_disconnect_aborts_every_stage(served: Served) -> None:
    """When a client disconnects after receiving the first text, every engine becomes idle and every
    slot is freed.
    """
    composition = served.composition

    async def scenario() -> None:
        events = composition.respond(
            served.prompt(PROMPTS["text"][0]),
            SamplingParams(temperature=0, max_tokens=150, ignore_eos=True),
            "leaves",
        )
        assert isinstance(await anext(events), TextDelta)
        await events.aclose()  # type: ignore[attr-defined]
        for engine in composition.engines:
            assert engine.engine.output_processor.get_num_unfinished_requests() == 0
        assert composition._slots.qsize() == TALKER["max_num_seqs"]

    served.run(scenario(), 20)
    assert served.run(served.reply(served.prompt("x"), GREEDY, "next"))


def test_a_killed_engine_is_named_and_nothing_hangs(served: Served) -> None:
    """When an engine is killed, a waiting request and every later request fail with an error that
    names the engine.

    This test runs last, because it kills an engine that all tests share.
    """
    composition = served.composition
    how = msgspec.structs.replace(
        GREEDY, chunk_codes=2, left_codes=0, right_codes=0, num_steps=1000
    )
    children = psutil.Process(os.getpid()).children(recursive=True)
    # Only token2wav runs a long command for each request, so the test kills token2wav's processes.
    core = composition.token2wav.engine.engine_core
    victims = [process for process in children if process.pid in engine_pids(core)]
    assert victims

    async def scenario() -> None:
        task = asyncio.create_task(served.reply(served.prompt(PROMPTS["text"][0]), how, "doomed"))
        await pause_task(1.0)
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        with pytest.raises(ComposedEngineDied, match="token2wav"):
            await task
        start = time.monotonic()
        with pytest.raises(ComposedEngineDied, match="token2wav"):
            await served.reply(served.prompt("x"), GREEDY, "late")
        assert time.monotonic() - start < seconds(1)
        assert composition._slots.qsize() == TALKER["max_num_seqs"]

    served.run(scenario(), 60)
    assert not composition.thinker.is_dead and not composition.talker.is_dead


def engine_pids(core: Any) -> set[int]:
    """Return the process ids of an engine core."""
    return {process.pid for process in core.resources.engine_manager.processes}
