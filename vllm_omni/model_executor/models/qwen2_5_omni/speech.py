# SPDX-License-Identifier: Apache-2.0
"""`SpeechComposition`: runs a request through the thinker, the talker and token2wav, and streams
text and audio.

    thinker --text--------------------------------------------> reader
       \\--states, when the reply is complete--> talker --codes--> token2wav --sound--> reader

There are two bounded queues: one for codes from the talker to token2wav, and one for events to the
reader. Audio is streamed in chunks, the first of which is short (`SpeechDefaults.part_codes`). Each
chunk is computed with the surrounding codes as context (`ready_chunks`). With `chunk_codes=0`, the
audio is one clip, which matches the output of Hugging Face Transformers.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.composition.composed_engine import ComposedEngine
from vllm_omni.composition.flow import Emit, run_flow
from vllm_omni.composition.speech import AudioChunk, SpeechModel, TextDelta
from vllm_omni.hidden_states import HiddenStates, HiddenStatesRequest, concat, hidden_states_of
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.qwen2_5_omni.options import SAMPLE_RATE, SpeechDefaults
from vllm_omni.model_executor.models.qwen2_5_omni.speech_text import (
    TalkerPromptBuilder,
    VisualGrids,
    visual_grids,
)
from vllm_omni.model_executor.models.qwen2_5_omni.talker_prompt import TalkerPrompt
from vllm_omni.outputs import RequestFailed


@dataclass
class SpeechTimings:
    """Timestamps of a request's events, in seconds."""

    start_s: float = field(default_factory=time.perf_counter)
    """Arrival time of the request, as read from `time.perf_counter`."""
    marks_s: dict[str, float] = field(default_factory=dict)
    """Time of each event in seconds since the arrival, keyed by event name."""

    def mark(self, name: str) -> None:
        """Record the time of an event if it has not been recorded before."""
        self.marks_s.setdefault(name, time.perf_counter() - self.start_s)

    def last(self, name: str) -> None:
        """Record the time of an event, replacing any earlier time."""
        self.marks_s[name] = time.perf_counter() - self.start_s


def ready_chunks(
    num_codes: int, finished: bool, emitted: int, how: SpeechDefaults
) -> Iterator[tuple[int, int, int, int]]:
    """Yield `(first, last, left, right)` for each audio chunk that follows the first `emitted`
    codes and can already be computed.

    A chunk is the audio of codes [first, last), with `left` and `right` codes of context. Until all
    codes have been generated (`finished`), only full chunks with complete right context are
    yielded. After that, all remaining chunks are yielded.
    """
    if how.chunk_codes == 0:
        if finished and num_codes:
            yield 0, num_codes, 0, 0
        return
    while emitted < num_codes:
        last = emitted + how.part_codes(emitted)
        if not finished and last + how.right_codes > num_codes:
            return
        last = min(last, num_codes)
        yield emitted, last, min(how.left_codes, emitted), min(how.right_codes, num_codes - last)
        emitted = last


@dataclass
class SpeechReply:
    """A reply that the talker and token2wav engines are converting to speech."""

    request_id: str
    """Id of the request."""
    how: SpeechDefaults
    """Speech options for this reply. `voice` is always set."""
    seed: int | None
    """Seed for the speech. None: a random seed is used."""
    timings: SpeechTimings = field(default_factory=SpeechTimings)
    """Timestamps of the request."""
    codes: asyncio.Queue[int | None] = field(init=False)
    """Codes from the talker to token2wav, terminated by None. The queue has room for all of a
    reply's codes.

    vLLM's engine generates codes at its own speed and buffers them. A shorter queue would not slow
    the engine down, but the reply would occupy the talker's slot until its audio was generated.
    """

    def __post_init__(self) -> None:
        self.codes = asyncio.Queue(maxsize=self.how.max_codes + 1)


class SpeechComposition:
    """A `SpeechModel` that consists of three engines on one checkpoint: the autoregressive thinker
    and talker, and the token2wav diffusion model.
    """

    sample_rate = SAMPLE_RATE

    def __init__(
        self,
        thinker: ComposedEngine,
        talker: ComposedEngine,
        token2wav: ComposedEngine,
        *,
        builder: TalkerPromptBuilder,
        defaults: SpeechDefaults,
    ) -> None:
        self.engines = (thinker, talker, token2wav)
        self.thinker, self.talker, self.token2wav = self.engines
        self.builder = builder
        self.defaults = msgspec.structs.replace(
            defaults, voice=defaults.voice or next(iter(builder.voices))
        )
        builder.check_voice(str(self.defaults.voice))
        config = talker.engine.vllm_config
        self._max_len = config.model_config.max_model_len
        # A slot is an index into the talker's buffers. Only one request may use it at a time.
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(1, config.scheduler_config.max_num_seqs + 1):
            self._slots.put_nowait(slot)

    def check_voice(self, voice: str | None) -> None:
        """If the checkpoint does not contain `voice`, raise `RequestFailed("invalid_request", ...)`
        with a list of all voices.
        """
        if voice:
            self.builder.check_voice(voice)

    def check_alive(self) -> None:
        """If an engine has died, raise `ComposedEngineDied` with the name of the first dead
        engine.
        """
        for engine in self.engines:
            engine.check_alive()

    async def respond(
        self,
        engine_input: Any,
        params: SamplingParams,
        request_id: str,
        speech: SpeechDefaults | None = None,
        *,
        voice: str | None = None,
        seed: int | None = None,
        timings: SpeechTimings | None = None,
    ) -> AsyncGenerator[TextDelta | AudioChunk, None]:
        """Generate a reply and convert it to speech. Text and audio are yielded as they are
        generated.

        `engine_input` is the thinker's rendered prompt. `speech` contains this request's speech
        options (None: the server's defaults), and `voice` overrides their voice. The method raises
        `RequestFailed`, `ComposedEngineDied`, or vLLM's own client errors. Closing the generator,
        or cancelling the task that reads from it, aborts the request in every engine.
        """
        spoken = self._start(request_id, speech, voice, seed, timings)
        params = params.clone()
        params.output_kind = RequestOutputKind.DELTA
        params.extra_args = {
            **(params.extra_args or {}),
            **HiddenStatesRequest(hidden_states="all").to_extra_args(),
        }

        async def think_and_talk(emit: Emit) -> None:
            prompt_ids: list[int] = []
            reply_ids: list[int] = []
            states: list[HiddenStates | None] = []
            async with aclosing(
                self.thinker.generate(engine_input, params, f"{request_id}-thinker")
            ) as outputs:
                async for output in outputs:
                    prompt_ids = prompt_ids or list(output.prompt_token_ids or ())
                    completion = output.outputs[0]
                    reply_ids.extend(completion.token_ids)
                    states.append(hidden_states_of(completion))
                    spoken.timings.mark("first_text")
                    await emit(TextDelta(completion.text, output))
            await self._talk(prompt_ids, reply_ids, states, visual_grids(engine_input), spoken)

        async with aclosing(
            run_flow([think_and_talk, lambda emit: self._sound(spoken, emit)])
        ) as events:
            async for event in events:
                yield event

    async def read_aloud(
        self,
        prompt_ids: Sequence[int],
        text_ids: Sequence[int],
        request_id: str,
        speech: SpeechDefaults | None = None,
        *,
        voice: str | None = None,
        seed: int | None = None,
        timings: SpeechTimings | None = None,
    ) -> AsyncGenerator[AudioChunk, None]:
        """Convert a given reply to speech, word for word. The thinker processes the reply as if it
        had generated the reply itself.

        `prompt_ids` is the conversation up to the reply. `text_ids` is the reply, including the
        end-of-turn token.
        """
        spoken = self._start(request_id, speech, voice, seed, timings)
        extra = HiddenStatesRequest(hidden_states="all").to_extra_args()
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)

        async def think_and_talk(emit: Emit) -> None:
            from vllm.inputs import tokens_input

            states: list[HiddenStates | None] = []
            # The last token is omitted, because its hidden state is not used. A sampled token takes
            # its place.
            prompt = tokens_input(prompt_token_ids=[*prompt_ids, *text_ids[:-1]])
            async for output in self.thinker.generate(prompt, params, f"{request_id}-thinker"):
                states.append(hidden_states_of(output))
            await self._talk(prompt_ids, text_ids, states, VisualGrids(), spoken)

        async with aclosing(
            run_flow([think_and_talk, lambda emit: self._sound(spoken, emit)])
        ) as events:
            async for event in events:
                yield event

    # -- engines -----------------------------------------------------------------------------------

    def _start(
        self,
        request_id: str,
        speech: SpeechDefaults | None,
        voice: str | None,
        seed: int | None,
        timings: SpeechTimings | None,
    ) -> SpeechReply:
        how = speech or self.defaults
        how = msgspec.structs.replace(how, voice=voice or how.voice or self.defaults.voice)
        self.builder.check_voice(str(how.voice))
        self.check_alive()
        return SpeechReply(request_id, how, seed, timings or SpeechTimings())

    async def _talk(
        self,
        prompt_ids: Sequence[int],
        reply_ids: Sequence[int],
        states: list[HiddenStates | None],
        grids: VisualGrids,
        spoken: SpeechReply,
    ) -> None:
        """Generate all codes for the speech and put them into the queue, followed by None."""
        spoken.timings.last("thinker_done")
        joined = concat(states)
        token_ids = [*prompt_ids, *reply_ids]
        prompt = None
        if joined is not None and len(reply_ids) > 1:
            prompt = await asyncio.to_thread(
                self.builder.build, token_ids, len(prompt_ids), joined, str(spoken.how.voice), grids
            )
        if prompt is not None:
            await self._generate_codes(prompt, spoken)
        await spoken.codes.put(None)

    async def _generate_codes(self, prompt: TalkerPrompt, spoken: SpeechReply) -> None:
        room = self._max_len - len(prompt.token_ids)
        if room < 1 or len(prompt.reply_RD) > self._max_len:
            raise RequestFailed(
                "too_long",
                f"a conversation of {len(prompt.token_ids)} tokens with a reply of "
                f"{len(prompt.reply_RD)} leaves no "
                f"room for speech in the talker's {self._max_len} tokens "
                "(omni.model.talker.max_model_len)",
            )
        stop, how = self.builder.stop_codes, spoken.how
        params = SamplingParams(
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            repetition_penalty=how.repetition_penalty,
            max_tokens=min(how.max_codes, room),
            stop_token_ids=stop,
            # vLLM's sampler uses signed 64-bit seeds
            seed=None if spoken.seed is None else spoken.seed % 2**63,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        slot = await self._slots.get()
        try:
            name = f"{spoken.request_id}-talker"
            async with aclosing(
                self.talker.generate(prompt.to_engine_input(name, slot), params, name)
            ) as outputs:
                async for output in outputs:
                    for code in output.outputs[0].token_ids:
                        if code not in stop:
                            spoken.timings.mark("first_code")
                            await spoken.codes.put(code)
            spoken.timings.last("talker_done")
        finally:
            self._slots.put_nowait(slot)

    async def _sound(self, spoken: SpeechReply, emit: Emit) -> None:
        how, timings = spoken.how, spoken.timings
        seed = secrets.randbits(62) if spoken.seed is None else spoken.seed
        collected: list[int] = []
        emitted, number, finished = 0, 0, False
        while not finished:
            code = await spoken.codes.get()
            finished = code is None
            if code is not None:
                collected.append(code)
            for first, last, left, right in ready_chunks(len(collected), finished, emitted, how):
                options: dict[str, Any] = {
                    "voice": how.voice,
                    "left_codes": left,
                    "right_codes": right,
                }
                if how.chunk_codes:
                    options["first_code"] = first - left
                part = torch.tensor(collected[first - left : last + right], dtype=torch.int64)
                params = DiffusionParams(
                    session_id=f"speech-{secrets.token_hex(16)}",
                    one_shot=True,
                    seed=seed,
                    num_inference_steps=how.num_steps,
                    guidance_scale=how.guidance_scale,
                    options=options,
                )
                start = time.perf_counter()
                meta, tensors = await self.token2wav.encode(
                    params, {"codes": part}, f"{spoken.request_id}-wav-{number}"
                )
                timings.marks_s["token2wav"] = (
                    timings.marks_s.get("token2wav", 0.0) + time.perf_counter() - start
                )
                timings.mark("first_audio")
                await emit(AudioChunk(tensors["audio"], meta["sample_rate"]))
                emitted, number = last, number + 1
        timings.last("done")


if TYPE_CHECKING:

    def _meets_protocol(model: SpeechComposition) -> SpeechModel:
        return model
