# SPDX-License-Identifier: Apache-2.0
"""`BitrateControl`: lowers a session's bitrate while its client receives data too slowly.

The measured quantity is the client's backlog, that is, the time that a finished chunk waits for the
network. A chunk should be transferred in a fraction of its playback time because the remaining time
is needed to generate the next chunk. The target bitrate falls quickly and rises slowly, so it
settles below the network's rate.
"""

from typing import Final

from vllm_omni.entrypoints.realtime.encoding.h264 import MAX_BITRATE, MIN_BITRATE

_MOST_SHARE: Final = 0.5
"""Fraction of a chunk's playback time that its transfer may take."""
_USED_SHARE: Final = 0.8
"""Fraction of the estimated bandwidth that the video may use. The rest is left for retransmitted
packets.
"""
_LOWER: Final = 0.6
_RAISE: Final = 1.08


class BitrateControl:
    """One session's target bitrate in bits per second."""

    def __init__(self) -> None:
        self.bits_per_s = MAX_BITRATE
        """Current target bitrate in bits per second."""

    def set_bandwidth(self, bits_per_s: int) -> None:
        """Set the target bitrate from the client's own bandwidth estimate."""
        self.bits_per_s = max(MIN_BITRATE, min(MAX_BITRATE, round(_USED_SHARE * bits_per_s)))

    def note_transfer(self, transfer_s: float, playing_s: float) -> None:
        """Adapt the target bitrate to one chunk's transfer time.

        Args:
            transfer_s: Time in seconds from the first to the last byte of the chunk.
            playing_s: The chunk's playing time in seconds.
        """
        is_behind = transfer_s > _MOST_SHARE * playing_s
        changed = self.bits_per_s * (_LOWER if is_behind else _RAISE)
        self.bits_per_s = round(max(MIN_BITRATE, min(MAX_BITRATE, changed)))
