# SPDX-License-Identifier: Apache-2.0
"""`DoorLimits`: every bound of the realtime doors, read once from the environment, frozen afterwards.

Stock `vllm serve` has no flags for these, so each field is an environment variable: `VLLM_OMNI_` + the field's name in
upper case (`VLLM_OMNI_IDLE_TIMEOUT_S=60`). The largest WebSocket message is `entrypoints/websocket.py`'s.
Held by tests/entrypoints/realtime/test_door_parts.py.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from vllm_omni.entrypoints.environment import read_struct
from vllm_omni.entrypoints.frame_budget import FrameBudget

MIB = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
SecondsOrNever = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class DoorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one API server process.

    idle_timeout_s: a connection without messages and without running requests is closed with 4010 after this.
    pinged_session_idle_s: a session without requests whose client sends pings stays for so long, if that is more than
    `omni.session_idle_s`; from the latter on it makes room for a new session.
    send_deadline_s: a reply that cannot be handed to the network in this time closes the connection with 4008.
    slow_reader_timeout_s: a client that takes less than it plays while more waits for it is closed with 4008 when that
    has gone on without pause for so long; 0 = never. The kernels' buffers hide the first seconds of it.
    chunk_timeout_s: an engine that has not answered one chunk in this time has it aborted (`timeout`).
    max_connections: open sockets of all doors together; one more is refused with HTTP 503.
    max_requests_per_connection: requests of one connection that run or wait; one more is `busy`.
    max_messages_per_s: a client that sends more is closed with 1008.
    max_small_frames_per_s: WebSocket frames of less than 1 KiB (fragments, pings, pongs, short messages) that a client
    may send on average, one second's worth at once; more closes the connection with 1008. At least twice
    `max_messages_per_s`.
    max_values_per_s: values (numbers, texts, list entries, keys) in the msgpack messages of one connection, on average;
    two seconds' worth may come at once, more closes it with 1008. A NumPy array is some ten values, whatever its size.
    max_frames_per_request: pixel frames one `infer` may ask for.
    max_image_bytes, max_image_pixels: start image, as a file and after decoding; both checked before decoding.
    max_prompt_chars: characters of a prompt.
    chunks_in_flight: chunks of one session that the engine may hold; 2 keep it busy between chunks. At least one more
    than `omni.chunks_in_flight`, if that is more than 1.
    unsent_chunks: finished chunks that may wait for a slow reader before the session pauses.
    journal_bytes: replies kept per session, for replay and resume.
    max_held_bytes: replies kept for all sessions together; beyond it journals are cut, sessions pause until their
    reader has caught up, and new ones are refused with `capacity`.
    sessions_per_client: sessions of one API key (without keys: of one address); one more is `session_limit`.
    handshake_timeout_s: a new connection of any kind must have sent its first request's headers in this time; 0 = no
    bound.
    start_timeout_s: a client of `/v1/realtime/video` must send `session.start` in this time.
    slot_wait_s: how long a start at a streaming endpoint of a full server waits for a session to end.
    """

    idle_timeout_s: Seconds = 300.0
    pinged_session_idle_s: Seconds = 3600.0
    send_deadline_s: Seconds = 3.0
    slow_reader_timeout_s: SecondsOrNever = 7.0
    chunk_timeout_s: Seconds = 300.0
    max_connections: Count = 256
    max_requests_per_connection: Count = 8
    max_messages_per_s: Count = 200
    max_small_frames_per_s: Count = 400
    max_values_per_s: Count = 32_768
    max_frames_per_request: Count = 9 + 12 * 40
    max_image_bytes: Bytes = 8 * MIB
    max_image_pixels: Bytes = 16 * MIB
    max_prompt_chars: Count = 8192
    chunks_in_flight: Count = 2
    unsent_chunks: Count = 2
    journal_bytes: Bytes = 32 * MIB
    max_held_bytes: Bytes = 1024 * MIB
    sessions_per_client: Count = 64
    handshake_timeout_s: SecondsOrNever = 10.0
    start_timeout_s: Seconds = 10.0
    slot_wait_s: Seconds = 15.0

    @property
    def frame_budget(self) -> FrameBudget:
        return FrameBudget(max(self.max_small_frames_per_s, 2 * self.max_messages_per_s))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "DoorLimits":
        """Read the variables that are set. Raises ValueError with the variable, its value and the allowed ones."""
        return read_struct(cls, environ)
