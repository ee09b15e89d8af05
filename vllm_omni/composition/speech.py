# SPDX-License-Identifier: Apache-2.0
"""`SpeechModel`: the interface between the speech endpoints and a model that generates speech.

A model family with speech output starts additional engines alongside the server's engine
(`ModelFamily.start_speech`). The speech endpoints (`entrypoints/speech`) depend only on this
interface, which depends neither on a model nor on HTTP.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.composition.composed_engine import ComposedEngine


@dataclass(frozen=True)
class TextDelta:
    """New text of the reply."""

    text: str
    """Text added to the reply."""
    output: RequestOutput
    """vLLM's output for the language model, including, for example, the finish reason and the token
    ids.
    """


@dataclass(frozen=True)
class AudioChunk:
    """The next section of the generated audio."""

    samples: torch.Tensor
    """Audio samples in [-1, 1]. Shape: fp32 [S]."""
    sample_rate: int
    """Sample rate of the audio in Hertz."""


class SpeechModel(Protocol):
    """Several engines that together generate text and speech.

    `respond` and `read_aloud` raise `RequestFailed`, `ComposedEngineDied` or one of vLLM's own
    client errors. If the caller closes the generator, or the task that reads it is cancelled, the
    request is aborted in every engine.
    """

    @property
    def sample_rate(self) -> int:
        """Sample rate, in Hertz, of every `AudioChunk`."""

    @property
    def engines(self) -> Sequence[ComposedEngine]:
        """All engines of the model. `ComposedEngine.shutdown` stops only the engines that were
        started in addition to the server's engine.
        """

    def check_voice(self, voice: str | None) -> None:
        """Check that the model has the given voice.

        Raises:
            RequestFailed: `invalid_request`; the message lists the voices.
        """

    def check_alive(self) -> None:
        """Check that all engines are alive.

        Raises:
            ComposedEngineDied: An engine is dead; the error names the first dead engine.
        """

    def respond(
        self,
        engine_input: Any,
        params: SamplingParams,
        request_id: str,
        *,
        voice: str | None = None,
        seed: int | None = None,
    ) -> AsyncGenerator[TextDelta | AudioChunk, None]:
        """Reply to a rendered prompt, yielding text and audio as they are generated.

        Args:
            engine_input: The rendered prompt.
            params: Sampling parameters for the text.
            request_id: Id of the request.
            voice: Name of the voice. None or "" selects the model's default.
            seed: Seed for sampling the audio. None selects a random seed.
        """

    def read_aloud(
        self,
        prompt_ids: Sequence[int],
        text_ids: Sequence[int],
        request_id: str,
        *,
        voice: str | None = None,
        seed: int | None = None,
    ) -> AsyncGenerator[AudioChunk, None]:
        """Synthesize the given reply word for word.

        Args:
            prompt_ids: Tokens of the conversation up to the reply.
            text_ids: Token ids of the reply, including the end token.
            request_id: Id of the request.
            voice: Name of the voice; see `respond`.
            seed: Seed for sampling the audio; see `respond`.
        """
