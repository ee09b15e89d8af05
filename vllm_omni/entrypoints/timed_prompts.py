# SPDX-License-Identifier: Apache-2.0
"""Prompts that take turns in one video: which prompt a stream has from which chunk or second on. Knows no door.

Held by tests/entrypoints/test_timed_prompts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MAX_PROMPTS: Final = 64
"""Of one video."""
_MAX_SECONDS: Final = 86_400.0
_MAX_CHARS: Final = 16_384  # as of a request's own prompt, inputs.Text


@dataclass(frozen=True, kw_only=True)
class TimedPrompt:
    """A prompt and where it begins: `seconds` of the video, or a `chunk`, counted from 0; one of the two.

    It holds from the first chunk on that begins there or later, until the next one does. Raises ValueError.
    """

    prompt: str
    seconds: float | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt.strip() or len(self.prompt) > _MAX_CHARS:
            raise ValueError(f"a timed prompt must have 1 to {_MAX_CHARS} characters, got {len(self.prompt)}")
        if (self.seconds is None) == (self.chunk is None):
            raise ValueError(f"a timed prompt needs either seconds or chunk, got {self.seconds} and {self.chunk}")
        if self.seconds is not None and not 0 <= self.seconds <= _MAX_SECONDS:
            raise ValueError(f"seconds of a timed prompt must be from 0 to {_MAX_SECONDS:g}, got {self.seconds}")
        if self.chunk is not None and self.chunk < 0:
            raise ValueError(f"chunk of a timed prompt must be at least 0, got {self.chunk}")

    @classmethod
    def parse(cls, text: str) -> "TimedPrompt":
        """Read `3:a town at night` (from chunk 3 on) or `7.5s:a town at night`. Raises ValueError."""
        where, _, prompt = text.partition(":")
        try:
            if where.endswith("s"):
                return cls(prompt=prompt, seconds=float(where[:-1]))
            return cls(prompt=prompt, chunk=int(where))
        except ValueError:
            raise ValueError(
                f"expected CHUNK:PROMPT or SECONDSs:PROMPT, for example '3:a town at night' or '7.5s:a town at night', "
                f"got {text[:80]!r}"
            ) from None

    @classmethod
    def read(cls, value: Any) -> "TimedPrompt":
        """Read a JSON object. Raises ValueError naming the field."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def has_begun(self, chunk_index: int, seconds: float) -> bool:
        """Whether it holds in a chunk that begins so many seconds into the video."""
        return seconds >= self.seconds if self.seconds is not None else chunk_index >= (self.chunk or 0)


def _schema(place: str, other: str, kind: str, **limits: float) -> dict[str, Any]:
    return {
        "properties": {
            "prompt": {"type": "string", "minLength": 1, "maxLength": _MAX_CHARS, "pattern": r"\S"},
            place: {"type": kind, "minimum": 0, **limits},
            other: {"type": "null"},
        },
        "required": ["prompt", place],
    }


JSON_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "oneOf": [_schema("seconds", "chunk", "number", maximum=_MAX_SECONDS), _schema("chunk", "seconds", "integer")],
}
"""Of a `TimedPrompt`."""


class PromptSchedule:
    """The prompts of one stream, taken chunk by chunk. fps: frames of a second of its video."""

    def __init__(self, prompts: Sequence[TimedPrompt], fps: float) -> None:
        self._coming, self._fps = tuple(prompts), fps

    def take(self, chunk_index: int, first_frame: int) -> str | None:
        """The prompt that begins with this chunk, of several the last in the list; None = the stream keeps its own.

        first_frame: of the chunk in the video. Each prompt is given out once.
        """
        if not self._coming:
            return None
        seconds = first_frame / self._fps
        begun = [prompt for prompt in self._coming if prompt.has_begun(chunk_index, seconds)]
        self._coming = tuple(prompt for prompt in self._coming if not prompt.has_begun(chunk_index, seconds))
        return begun[-1].prompt if begun else None
