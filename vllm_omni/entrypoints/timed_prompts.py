# SPDX-License-Identifier: Apache-2.0
"""Prompts that take effect at a given chunk or second of a video."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MAX_PROMPTS: Final = 64
"""Maximum number of prompts for one video."""
_MAX_SECONDS: Final = 86_400.0
_MAX_CHARS: Final = 16_384  # same limit as for a request's own prompt (`inputs.Text`)


@dataclass(frozen=True, kw_only=True)
class TimedPrompt:
    """A prompt and its start, given in seconds or as a chunk index.

    A prompt applies from the first chunk at or after its start until the next prompt.

    Raises:
        ValueError: A value is out of range, or neither or both of `seconds` and `chunk` are given.
    """

    prompt: str
    """Prompt text."""
    seconds: float | None = None
    """Start of the prompt in seconds of video time, at least 0. None: `chunk` specifies the start.
    """
    chunk: int | None = None
    """Start of the prompt as a chunk index, at least 0. None: `seconds` specifies the start."""

    def __post_init__(self) -> None:
        if not self.prompt.strip() or len(self.prompt) > _MAX_CHARS:
            raise ValueError(
                f"a timed prompt must have 1 to {_MAX_CHARS} characters, got {len(self.prompt)}"
            )
        if (self.seconds is None) == (self.chunk is None):
            raise ValueError(
                f"a timed prompt needs either seconds or chunk, got {self.seconds} and {self.chunk}"
            )
        if self.seconds is not None and not 0 <= self.seconds <= _MAX_SECONDS:
            raise ValueError(
                f"seconds of a timed prompt must be from 0 to {_MAX_SECONDS:g}, got {self.seconds}"
            )
        if self.chunk is not None and self.chunk < 0:
            raise ValueError(f"chunk of a timed prompt must be at least 0, got {self.chunk}")

    @classmethod
    def parse(cls, text: str) -> "TimedPrompt":
        """Parse `3:a town at night` (from chunk 3 on) or `7.5s:a town at night` (from 7.5 s on).

        Raises:
            ValueError: The text has neither of the two forms.
        """
        where, _, prompt = text.partition(":")
        try:
            if where.endswith("s"):
                return cls(prompt=prompt, seconds=float(where[:-1]))
            return cls(prompt=prompt, chunk=int(where))
        except ValueError:
            raise ValueError(
                "expected CHUNK:PROMPT or SECONDSs:PROMPT, for example '3:a town at night' or "
                f"'7.5s:a town at night', got {text[:80]!r}"
            ) from None

    @classmethod
    def read_json(cls, value: Any) -> "TimedPrompt":
        """Parse a JSON object.

        Raises:
            ValueError: A field is invalid. The error message names the invalid entry.
        """
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def has_started(self, chunk_index: int, seconds: float) -> bool:
        """Return whether the prompt applies to a chunk.

        Args:
            chunk_index: Index of the chunk.
            seconds: Start of the chunk in seconds of video time.
        """
        return (
            seconds >= self.seconds
            if self.seconds is not None
            else chunk_index >= (self.chunk or 0)
        )


def _schema(position: str, other: str, kind: str, **limits: float) -> dict[str, Any]:
    return {
        "properties": {
            "prompt": {"type": "string", "minLength": 1, "maxLength": _MAX_CHARS, "pattern": r"\S"},
            position: {"type": kind, "minimum": 0, **limits},
            other: {"type": "null"},
        },
        "required": ["prompt", position],
    }


JSON_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "oneOf": [
        _schema("seconds", "chunk", "number", maximum=_MAX_SECONDS),
        _schema("chunk", "seconds", "integer"),
    ],
}
"""JSON schema for a `TimedPrompt`."""


class PromptSchedule(msgspec.Struct):
    """One stream's timed prompts."""

    prompts: Sequence[TimedPrompt]
    """Prompts that have not taken effect yet."""
    fps: float
    """Frame rate of the video in frames per second."""

    def take_prompt(self, chunk_index: int, first_frame: int) -> str | None:
        """Return the prompt that takes effect with a chunk, or None if the current prompt remains.

        Each prompt is returned once. If several prompts start with the same chunk, the last one in
        the list is returned.

        Args:
            chunk_index: Index of the chunk.
            first_frame: Index of the chunk's first pixel frame in the video.
        """
        if not self.prompts:
            return None
        seconds = first_frame / self.fps
        started = [prompt for prompt in self.prompts if prompt.has_started(chunk_index, seconds)]
        self.prompts = tuple(
            prompt for prompt in self.prompts if not prompt.has_started(chunk_index, seconds)
        )
        return started[-1].prompt if started else None
