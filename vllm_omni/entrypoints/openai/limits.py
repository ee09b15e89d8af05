# SPDX-License-Identifier: Apache-2.0
"""`MediaLimits`: limits for the image and video routes, read once from environment variables.

Each field is set by the environment variable named `VLLM_OMNI_` followed by the field name in upper
case, for example `VLLM_OMNI_MAX_QUEUED_VIDEOS=8`. `EndpointLimits` contains the limits on input
images (`max_image_bytes`, `max_image_pixels`).
"""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 44)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)]


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per API server process unless a field states otherwise."""

    max_body_bytes: Bytes = 64 << 20
    """Maximum size of a request body in bytes. A larger body is refused with status 413 while it is
    being received. Default: 64 MiB.
    """
    max_image_requests: Count = 64
    """Maximum number of running and waiting image calls. Additional calls are refused with status
    429. Default: 64.
    """
    max_running_videos: Count = 2
    """Maximum number of video jobs that run in the engine at the same time. Default: 2."""
    max_queued_videos: Count = 32
    """Maximum number of waiting video jobs. Additional jobs are refused with status 429. Default:
    32.
    """
    request_timeout_s: Seconds = 1800.0
    """Time in seconds after which an engine request (one image, one video, one chunk) is aborted.
    Default: 1800.
    """
    queue_timeout_s: Seconds = 600.0
    """Time in seconds after which a video job that waits for the engine fails with `capacity`.
    Default: 600.
    """
    image_wait_s: Seconds = 60.0
    """Time in seconds after which an image call that waits for the engine fails with `capacity`.
    Default: 60.
    """
    media_dir: str = ""
    """Directory for finished files and job records. Set it to retain videos across restarts or to
    share them between servers. Default: a private temporary directory that is removed when the
    server exits.
    """
    media_ttl_s: Seconds = 86_400.0
    """Time in seconds after which finished files are removed. Default: 86400."""
    max_videos: Count = 256
    """Maximum number of finished video jobs in the media directory across all processes. The oldest
    jobs are removed first. Default: 256.
    """
    max_media_bytes: Bytes = 8 << 30
    """Maximum total size, in bytes, of the finished files in the media directory. Default: 8 GiB.
    """
    stats_interval_s: Seconds = 15.0
    """Interval in seconds at which engine statistics are requested for metrics and readiness.
    Default: 15.
    """
