# SPDX-License-Identifier: Apache-2.0
"""`BitrateControl`: lowers a session's bitrate while its client receives too slowly.

The measure is the client's backlog: for how long a chunk that was ready still waited for the
network. A chunk should arrive in a fraction of its playing time, because what is left is needed to
generate the next one. The target falls quickly and rises slowly, so that it settles below the rate
of the network.
"""

from typing import Final

from vllm_omni.entrypoints.realtime.encoding.h264 import MAX_BITRATE, MIN_BITRATE

_MOST_SHARE: Final = 0.5
"""Share of its playing time that a chunk may take to arrive."""
_USED_SHARE: Final = 0.8
"""Share of the estimated bandwidth that the video may use; repeated packets need the rest."""
_LOWER: Final = 0.6
_RAISE: Final = 1.08


class BitrateControl:
    """Target of one session in bits per second."""

    def __init__(self) -> None:
        self.bits_per_s = MAX_BITRATE
        """Current target."""

    def set_bandwidth(self, bits_per_s: int) -> None:
        """Set the target by the client's own estimate of its bandwidth."""
        self.bits_per_s = max(MIN_BITRATE, min(MAX_BITRATE, round(_USED_SHARE * bits_per_s)))

    def note_transfer(self, transfer_s: float, playing_s: float) -> None:
        """Adapt the target to the transfer of one chunk.

        Args:
            transfer_s: Time from the first to the last byte in seconds.
            playing_s: Playing time of the chunk in seconds.
        """
        is_behind = transfer_s > _MOST_SHARE * playing_s
        changed = self.bits_per_s * (_LOWER if is_behind else _RAISE)
        self.bits_per_s = round(max(MIN_BITRATE, min(MAX_BITRATE, changed)))
