# SPDX-License-Identifier: Apache-2.0
"""`EndpointLimits`: limits for the realtime endpoints, read once from environment variables.

Each field is set by the environment variable `VLLM_OMNI_` followed by the field's name in upper
case, for example `VLLM_OMNI_IDLE_TIMEOUT_S=60` (`engine/environment.py`).
`entrypoints/websocket.py` limits the size of WebSocket messages.
"""

from typing import Annotated

import msgspec

from vllm_omni.entrypoints.limits.frame_budget import FrameBudget

MIB = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
SecondsOrNever = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class EndpointLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one API server process."""

    idle_timeout_s: Seconds = 300.0
    """Time in seconds after which an idle connection is closed with 4010. A connection is idle
    while its client sends no messages and none of the connection's requests is running. Default:
    300.
    """
    pinged_session_idle_s: Seconds = 3600.0
    """Idle time in seconds after which a session is closed even if its client sends pings. The
    value has no effect if it is shorter than `omni.session_idle_s`. A new session may evict the
    idle session after `omni.session_idle_s`. Default: 3600.
    """
    reconnect_grace_s: Seconds = 15.0
    """Time in seconds during which a session whose connection broke is not evicted for a new
    session, so that its client can reconnect. The time is at most `omni.session_idle_s`. It does
    not apply if the server or, with code 1000, the client closes the connection. Default: 15.
    """
    send_deadline_s: Seconds = 3.0
    """Time limit in seconds for the network to accept a reply. A connection that exceeds the limit
    is closed with 4008. Default: 3.
    """
    slow_reader_timeout_s: SecondsOrNever = 7.0
    """Maximum time in seconds that a client may receive video more slowly than it plays while more
    video is waiting. After this time, the connection is closed with 4008. 0 disables the limit.
    Network buffers hide the first seconds of slow reading. Default: 7.
    """
    chunk_timeout_s: Seconds = 300.0
    """Time in seconds after which an unfinished chunk is aborted with `timeout`. Default: 300."""
    max_connections: Count = 256
    """Maximum number of open WebSockets across all endpoints. Further connections are refused with
    HTTP 503. Default: 256.
    """
    max_requests_per_connection: Count = 8
    """Maximum number of running and waiting requests per connection. Further requests are refused
    with `busy`. Default: 8.
    """
    max_messages_per_s: Count = 200
    """Maximum number of messages per second on one connection. A connection that exceeds the limit
    is closed with 1008. Default: 200.
    """
    max_small_frames_per_s: Count = 400
    """Maximum average number of WebSocket frames below 1 KiB (fragments, pings, pongs, short
    messages) per second on one connection. Bursts of one second's worth are allowed. A connection
    that exceeds the limit is closed with 1008. The value must be at least twice
    `max_messages_per_s`. Default: 400.
    """
    max_values_per_s: Count = 32_768
    """Maximum average number of values (numbers, strings, list entries, keys) per second in one
    connection's msgpack messages. Bursts of two seconds' worth are allowed. A connection that
    exceeds the limit is closed with 1008. A NumPy array counts as about ten values. Default: 32768.
    """
    max_frames_per_request: Count = 9 + 12 * 40
    """Maximum number of pixel frames that one `infer` request may generate. Default: 489."""
    max_image_bytes: Bytes = 8 * MIB
    """Maximum size in bytes of a start image file. The size is checked before decoding. Default: 8
    MiB.
    """
    max_image_pixels: Bytes = 16 * MIB
    """Maximum number of pixels in a start image. The number is checked before decoding. Default: 16
    Mi.
    """
    max_prompt_chars: Count = 8192
    """Maximum number of characters in a prompt. Default: 8192."""
    chunks_in_flight: Count = 2
    """Maximum number of one session's chunks in the engine at the same time. A value of 2 keeps the
    engine from idling between chunks. If `omni.chunks_in_flight` exceeds 1, the limit is at least
    `omni.chunks_in_flight` + 1. Default: 2.
    """
    unsent_chunks: Count = 2
    """Maximum number of finished chunks that wait for a slow client before the session pauses.
    Default: 2.
    """
    delivery_log_bytes: Bytes = 32 * MIB
    """Maximum size in bytes of the replies that a session retains for replay and resume. Default:
    32 MiB.
    """
    max_held_bytes: Bytes = 1024 * MIB
    """Maximum total size in bytes of the replies that all sessions retain. Above this size,
    delivered replies are dropped, sessions pause until their clients have caught up, and new
    sessions are refused with `capacity`. Default: 1 GiB.
    """
    sessions_per_client: Count = 64
    """Maximum number of sessions per API key, or per address if the server has no keys. Further
    sessions are refused with `session_limit`. Default: 64.
    """
    start_timeout_s: Seconds = 10.0
    """Time in seconds within which a client of `/v1/realtime/video` must send `session.start`.
    Default: 10.
    """
    slot_wait_s: Seconds = 15.0
    """Maximum time in seconds that a new stream waits for a free session if all sessions are in
    use. Default: 15.
    """

    gpu_encoders: bool = False
    """Whether live video is encoded on the GPU where possible. Default: false, because NVENC has
    not been tested, and the encoders use GPU memory in each API server process.
    """

    @property
    def frame_budget(self) -> FrameBudget:
        return FrameBudget(max(self.max_small_frames_per_s, 2 * self.max_messages_per_s))
