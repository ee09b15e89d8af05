# SPDX-License-Identifier: Apache-2.0
"""`Audience`: sends a session's video to its spectators, as H.264 that is encoded once for all
spectators.

If the player receives H.264, spectators receive the same access units. Otherwise, the audience has
a separate encoder, which runs after the player's frames have been encoded. A spectator that does
not keep up misses chunks and continues at a key frame. No code in this module waits for a
spectator, so a spectator cannot delay the player or other spectators.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart, StampedFrames
from vllm_omni.entrypoints.realtime.encoding.implementations import Implementations
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec, SessionEncoders

MAX_SPECTATORS: Final = 64
"""Maximum number of spectators per session."""
_MAX_UNSENT_CHUNKS: Final = 2
"""Maximum number of chunks that may wait for a spectator or for the audience's encoder. When more
chunks arrive, older chunks are dropped.
"""
_KEY_FRAMES_APART_S: Final = 1.0
"""Minimum time in seconds between key frames for spectators. Key frames use up bitrate in the
player's stream, so they must not be frequent.
"""


class AudienceHost(Protocol):
    """The part of the session manager's interface that an audience uses."""

    implementations: Callable[[], Implementations]
    """Function that returns the codec implementations."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...

    async def off_loop(self, function: Any, *args: Any) -> Any: ...


class Spectator:
    """One of a session's spectators, with a queue of access units to send."""

    def __init__(self) -> None:
        self.needs_key = True
        """Whether access units are dropped until the next key frame."""
        self.num_dropped = 0
        """Number of chunks dropped because the spectator did not keep up."""
        self._chunks: deque[list[EncodedPart]] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    async def next_units(self) -> list[EncodedPart] | None:
        """Wait for the next chunk's access units. Return None when the session has ended."""
        while not self._chunks:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    def put(self, units: list[EncodedPart]) -> None:
        """Queue access units, starting with the first one that the spectator can decode. This
        method never waits.
        """
        if len(self._chunks) >= _MAX_UNSENT_CHUNKS:
            self.num_dropped += len(self._chunks)
            self._chunks.clear()
            self.needs_key = True
        if self.needs_key:
            start = next((at for at, unit in enumerate(units) if unit.is_key), None)
            if start is None:
                return
            units, self.needs_key = units[start:], False
        self._chunks.append(units)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()


class Audience:
    """One session's spectators. This class is not thread-safe; use it from a single event loop."""

    def __init__(self, host: AudienceHost) -> None:
        self._host = host
        self._spectators: set[Spectator] = set()
        self._encoders: SessionEncoders | None = None
        self._waiting: deque[tuple[StampedFrames, float]] = deque()
        self._encoding: asyncio.Task[None] | None = None
        self._key_frame_s = float("-inf")

    def __len__(self) -> int:
        return len(self._spectators)

    def join(self) -> Spectator:
        """Add a spectator.

        Raises:
            EndpointError: `capacity` if the session has too many spectators.
        """
        if len(self._spectators) >= MAX_SPECTATORS:
            raise EndpointError("capacity", f"the session has {MAX_SPECTATORS} spectators")
        spectator = Spectator()
        self._spectators.add(spectator)
        return spectator

    def leave(self, spectator: Spectator) -> None:
        self._spectators.discard(spectator)
        if not self._spectators:
            self._encoders = None
            self._waiting.clear()

    def publish(self, frames: StampedFrames, fps: float, player: SessionEncoders) -> None:
        """Send a chunk to the spectators without waiting for them.

        Args:
            frames: The chunk's frames.
            fps: Playback rate in frames per second.
            player: The session's encoders, which have encoded the chunk.
        """
        units = player.units_of(frames)
        if units is not None:
            self._send(units)
            self._request_key_frame(player)
            return
        self._waiting.append((frames, fps))
        if len(self._waiting) > _MAX_UNSENT_CHUNKS:
            self._waiting.popleft()
        if self._encoding is None or self._encoding.done():
            self._encoding = self._host.spawn(self._encode())

    def reset(self) -> None:
        """Make all spectators continue with a key frame because the session restarts."""
        for spectator in self._spectators:
            spectator.needs_key = True
        self._key_frame_s = float("-inf")

    def end(self) -> None:
        """End all spectators' streams because the session has ended."""
        for spectator in self._spectators:
            spectator.end()

    async def _encode(self) -> None:
        while self._waiting:
            frames, fps = self._waiting.popleft()
            encoders = self._encoders
            if encoders is None:
                encoders = self._encoders = SessionEncoders(self._host.implementations)
            self._request_key_frame(encoders)
            spec = EncoderSpec(codec="h264", fps=fps)
            self._send(await self._host.off_loop(encoders.encode, spec, frames))

    def _send(self, units: list[EncodedPart]) -> None:
        for spectator in self._spectators:
            spectator.put(units)

    def _request_key_frame(self, encoders: SessionEncoders) -> None:
        """Request a key frame if a spectator requires one, unless the last one was requested too
        recently.
        """
        now_s = time.monotonic()
        if now_s - self._key_frame_s < _KEY_FRAMES_APART_S:
            return
        if any(spectator.needs_key for spectator in self._spectators):
            self._key_frame_s = now_s
            encoders.request_key_frame()
