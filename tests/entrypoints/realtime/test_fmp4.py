# SPDX-License-Identifier: Apache-2.0
"""Fragmented MP4: a browser can append every fragment, and the concatenated fragments are a valid
file.
"""

import re

import numpy as np
import pytest

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.realtime.encoding.fmp4 import FragmentEncoder


def frames(first: int, count: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Return grey frames, in which every pixel of frame n has the value 2 n."""
    numbers = 2 * np.arange(first, first + count, dtype=np.uint8)
    return np.broadcast_to(numbers[:, None, None, None], (count, height, width, 3)).copy()


def boxes(data: bytes) -> list[bytes]:
    """Return the types of the top-level boxes."""
    found, at = [], 0
    while at < len(data):
        found.append(data[at + 4 : at + 8])
        at += int.from_bytes(data[at : at + 4])
    return found


def test_fragments_join_into_one_file() -> None:
    """The fragments of chunks of 9, 12 and 12 frames concatenate to a file of 33 frames, in order
    and at the given frame rate.
    """
    encoder = FragmentEncoder(16.0)
    parts = [
        encoder.encode_fragment(frames(first, count), first)
        for first, count in ((0, 9), (9, 12), (21, 12))
    ]
    assert boxes(parts[0]) == [b"ftyp", b"moov", b"moof", b"mdat"]
    assert boxes(parts[1]) == [b"moof", b"mdat"]
    video_THWC, fps = decode_mp4(b"".join(parts))
    assert (video_THWC.shape, fps) == ((33, 32, 48, 3), 16.0)
    np.testing.assert_allclose(video_THWC[:, 16, 24, 0], 2 * np.arange(33), atol=3)


def test_a_stream_can_be_joined_in_the_middle() -> None:
    """The initialisation segment can be played with any later fragment, because every fragment
    starts with a key frame.
    """
    encoder = FragmentEncoder(8.0)
    first = encoder.encode_fragment(frames(0, 4), 0)
    encoder.encode_fragment(frames(4, 4), 4)
    last = encoder.encode_fragment(frames(8, 4), 8)
    video_THWC, _ = decode_mp4(first[: first.index(b"moof") - 4] + last)
    np.testing.assert_allclose(video_THWC[:, 16, 24, 0], 2 * np.arange(8, 12), atol=3)


def test_fragments_carry_their_time_and_number() -> None:
    """Across fragments, `tfdt` continues from the previous fragment and `mfhd` counts from 1. Data
    offsets are relative to their fragment.
    """
    encoder = FragmentEncoder(16.0)
    parts = [
        encoder.encode_fragment(frames(0, 9), 0),
        encoder.encode_fragment(frames(9, 12), 9),
        encoder.encode_fragment(frames(21, 12), 21),
    ]
    starts, numbers = [], []
    for part in parts:
        at = part.index(b"tfdt") + 8
        starts.append(int.from_bytes(part[at : at + 8]))
        at = part.index(b"mfhd") + 8
        numbers.append(int.from_bytes(part[at : at + 4]))
        at = part.index(b"tfhd") + 4
        assert int.from_bytes(part[at + 1 : at + 4]) & 0x020000, "default-base-is-moof"
    assert numbers == [1, 2, 3]
    assert starts[1] * 21 == starts[2] * 9
    assert starts[0] == 0 < starts[1]


def test_the_mime_type_names_the_codec() -> None:
    """The MIME type names the codec, as `MediaSource.addSourceBuffer` requires, and is available
    after the first frame.
    """
    encoder = FragmentEncoder(16.0)
    assert encoder.mime_type is None
    encoder.encode_fragment(frames(0, 1), 0)
    assert encoder.mime_type is not None
    assert re.fullmatch(r'video/mp4; codecs="avc1\.[0-9a-f]{6}"', encoder.mime_type)


def test_odd_sides_are_padded() -> None:
    """Odd heights and widths are padded, because H.264 in yuv420p requires even sizes."""
    video_THWC, _ = decode_mp4(FragmentEncoder(16.0).encode_fragment(frames(0, 2, 31, 47), 0))
    assert video_THWC.shape == (2, 32, 48, 3)


@pytest.mark.parametrize("fps", [0, -1, 1e6])
def test_an_impossible_frame_rate_is_refused(fps: float) -> None:
    with pytest.raises(ValueError, match="fps"):
        FragmentEncoder(fps)


def test_another_size_is_refused() -> None:
    encoder = FragmentEncoder(16.0)
    encoder.encode_fragment(frames(0, 1), 0)
    with pytest.raises(ValueError, match="same size"):
        encoder.encode_fragment(frames(1, 1, 64, 64), 1)
