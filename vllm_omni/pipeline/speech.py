# SPDX-License-Identifier: Apache-2.0
"""`SpeechModel`: the contract between the speech routes and a model that speaks, and the events that it yields.

A family that speaks starts its engines beside the server's (`ModelFamily.start_speech`); the routes
(`entrypoints/speech`) know only this. Knows neither a model nor HTTP. Held by
tests/entrypoints/speech/test_speech_routes.py and test_speech_served.py.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.pipeline.stage import Stage


@dataclass(frozen=True)
class TextDelta:
    """New text of the reply. `output` is the language model's stock output (finish reason, token ids)."""

    text: str
    output: RequestOutput


@dataclass(frozen=True)
class AudioChunk:
    """The next piece of sound: fp32 [S] in [-1, 1]."""

    samples: torch.Tensor
    sample_rate: int


class SpeechModel(Protocol):
    """Several engines that answer in text and speech.

    `respond` and `read_aloud` raise `RequestFailed`, `StageDied`, or vLLM's own client errors; closing their generator
    or cancelling its reader aborts the request in every stage. voice: None or "" = the model's default. seed: of all
    that is sampled for the sound; None = any.
    """

    @property
    def sample_rate(self) -> int:
        """Hertz, of every `AudioChunk`."""

    @property
    def stages(self) -> Sequence[Stage]:
        """All engines; `Stage.shutdown` stops those that were started beside the server's."""

    def check_voice(self, voice: str | None) -> None:
        """Raise `RequestFailed("invalid_request", ...)` that lists the voices, unless the model has this one."""

    def check_alive(self) -> None:
        """Raise `StageDied` naming the first dead stage."""

    def respond(
        self,
        engine_input: Any,
        params: SamplingParams,
        request_id: str,
        *,
        voice: str | None = None,
        seed: int | None = None,
    ) -> AsyncGenerator[TextDelta | AudioChunk, None]:
        """Answer a rendered prompt: text while it is thought, sound while it is spoken."""

    def read_aloud(
        self,
        prompt_ids: Sequence[int],
        text_ids: Sequence[int],
        request_id: str,
        *,
        voice: str | None = None,
        seed: int | None = None,
    ) -> AsyncGenerator[AudioChunk, None]:
        """Speak a given reply, word for word.

        prompt_ids: the conversation up to the reply. text_ids: the reply, with the token that ends the turn.
        """
