# SPDX-License-Identifier: Apache-2.0
"""`MediaLimits`: every bound of the image and video routes, read once from the environment, frozen afterwards.

Each field is the variable `VLLM_OMNI_` + its name in upper case (`VLLM_OMNI_MAX_QUEUED_VIDEOS=8`). Bounds of input
pictures are `DoorLimits`' (`max_image_bytes`, `max_image_pixels`), shared with the realtime doors.
"""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 44)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)]


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one API server process, unless said otherwise.

    max_body_bytes: a larger request body is refused with 413 while it arrives. max_image_requests: image calls at
    work or waiting; one more is refused with 429. max_running_videos: video jobs in the engine at a time.
    max_queued_videos: jobs that wait for that; one more is refused with 429. request_timeout_s: an engine request
    (one picture, one video, one chunk) that takes longer is aborted. queue_timeout_s: a video job that found no room
    in the engine for so long fails with `capacity`. media_dir: where finished files and job records are kept; empty =
    a private temporary directory that goes with the server. Name one to keep videos over a restart, or to share it
    between servers. media_ttl_s: finished files are removed after this. max_videos, max_media_bytes: finished jobs
    and their files kept in the directory by all processes together; the oldest go first. stats_interval_s: how often
    the engine is asked for the sessions and bytes it holds, for metrics and readiness.
    """

    max_body_bytes: Bytes = 64 << 20
    max_image_requests: Count = 64
    max_running_videos: Count = 2
    max_queued_videos: Count = 32
    request_timeout_s: Seconds = 1800.0
    queue_timeout_s: Seconds = 600.0
    image_wait_s: Seconds = 60.0
    media_dir: str = ""
    media_ttl_s: Seconds = 86_400.0
    max_videos: Count = 256
    max_media_bytes: Bytes = 8 << 30
    stats_interval_s: Seconds = 15.0
