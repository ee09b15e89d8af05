# SPDX-License-Identifier: Apache-2.0
"""Tests that run the page's JavaScript modules in a browser and compare them with this package's
Python code.
"""

import base64
import io
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from helpers.walking import SPACE
from page_server import PageServer

from vllm_omni.actions import ActionFrame, check_frame
from vllm_omni.entrypoints.media.mp4 import decode_mp4, encode_mp4
from vllm_omni.entrypoints.realtime.connection.codec import decode
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.encoding.frames import stamped_frames
from vllm_omni.entrypoints.realtime.encoding.h264 import H264Encoder, access_unit_fields
from vllm_omni.worlds.start_pose import StartPose

pytestmark = pytest.mark.nightly

NUM_VALUES = 1000


@pytest.fixture(scope="module")
def module_page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Yield a tab on the page's origin, so that tests can import its modules. The tab's server
    serves only files.
    """
    with (
        PageServer(FakeEngine(), EndpointLimits(), StreamInfo(), [], {}) as server,
        browser.page(server.url) as page,
    ):
        page.run(
            "window.b64 = (bytes) => btoa(Array.from(bytes, (b) => "
            "String.fromCharCode(b)).join(''))"
        )
        page.run("window.raw = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0))")
        yield page


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ---- msgpack
# --------------------------------------------------------------------------------------------------

EDGES = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**53 - 1]
EDGES += [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**53) + 1]


def values(count: int) -> list[Any]:
    """Return random values of every type that both sides support. The values are the same in every
    run.
    """
    rng = random.Random(7)

    def text() -> str:
        kinds = (range(32, 127), range(160, 0xD800), range(0x1F300, 0x1F600))
        return "".join(chr(rng.choice(rng.choice(kinds))) for _ in range(rng.randrange(40)))

    def value(depth: int) -> Any:
        match rng.randrange(9 if depth < 4 else 6):
            case 0:
                return rng.choice([None, True, False])
            case 1:
                return rng.choice(EDGES)
            case 2:
                return rng.randrange(-(2**53) + 1, 2**53)
            case 3:
                return rng.choice([0.5, -1e300, 5e-324, rng.uniform(-1e6, 1e6), rng.random()])
            case 4 | 5:
                return text()
            case 6 | 7:
                return [value(depth + 1) for _ in range(rng.choice([0, 1, 3, 15, 16, 20]))]
            case _:
                return {text(): value(depth + 1) for _ in range(rng.choice([0, 1, 3, 17]))}

    return [value(0) for _ in range(count)]


def test_the_server_reads_messages_of_the_browser(module_page: Page) -> None:
    """Values of every type that the browser can encode are decoded by the server unchanged."""
    sent = values(NUM_VALUES)
    texts = module_page.call(
        "/omni/js/msgpack.js", "return a[0].map((v) => b64(m.encode(v)))", sent
    )
    assert [_plain(decode(base64.b64decode(text)).value) for text in texts] == [
        _plain(value) for value in sent
    ]


def test_the_browser_reads_messages_of_the_server(module_page: Page) -> None:
    sent = values(NUM_VALUES)
    data = [b64(msgspec.msgpack.encode(value)) for value in sent]
    read = module_page.call(
        "/omni/js/msgpack.js", "return a[0].map((t) => JSON.stringify(m.decode(raw(t))))", data
    )
    assert [_plain(json.loads(text)) for text in read] == [_plain(value) for value in sent]


def _plain(value: Any) -> Any:
    """Convert a value to one that JavaScript can represent. JavaScript has only one number type, so
    whole floats become integers. An object's key order may change.
    """
    if isinstance(value, dict):
        return sorted([key, _plain(item)] for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def test_lengths_at_each_header_size_survive(module_page: Page) -> None:
    """Values with lengths just below and just above each change of header size survive a round
    trip.
    """
    sizes = [0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536, 70000]
    code = """return a[0].map((n) => { const bytes = new Uint8Array(n).map((_, i) => i * 7);
        const back = m.decode(m.encode({ bytes, text: "é".repeat(n), list: new Array(n).fill(null) }));
        return back.bytes.length === n && back.bytes.every((b, i) => b === ((i * 7) & 255))
            && back.text.length === n && back.list.length === n; })"""  # noqa: E501
    assert module_page.call("/omni/js/msgpack.js", code, sizes) == [True] * len(sizes)
    text = module_page.call(
        "/omni/js/msgpack.js", "return b64(m.encode({x: new Uint8Array(70000)}))"
    )
    assert decode(base64.b64decode(text)).value == {"x": bytes(70000)}


def test_broken_messages_are_refused(module_page: Page) -> None:
    """Truncated messages, trailing bytes, wrong lengths, extension types and deep nesting raise
    `MsgpackError`.
    """
    good = msgspec.msgpack.encode({"a": [1, 2.5, "text", b"bytes", {"b": None}], "c": -70000})
    bad = [good[:cut] for cut in range(len(good))] + [
        good + b"\0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ]
    bad += [
        b"\xc7\x01\x01\x00",
        b"\xc1",
        b"\x91" * 40 + b"\xc0",
        b"\xa2\xff\xff",
        b"\x81\x01\x01",
        b"\xc6\xff\xff\xff\xff",
    ]
    code = """return a[0].map((t) => { try { m.decode(raw(t)); return "read"; }
        catch (e) { return e instanceof m.MsgpackError ? "refused" : String(e); } })"""
    assert set(module_page.call("/omni/js/msgpack.js", code, [b64(data) for data in bad])) == {
        "refused"
    }


# ---- MP4
# --------------------------------------------------------------------------------------------------


def clips(counts: list[int], fps: float = 16, size: tuple[int, int] = (64, 48)) -> list[bytes]:
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.integers(-3, 4, (sum(counts), size[1] // 8, size[0] // 8, 3)), 0) + 128
    frames_THWC = np.clip(walk, 0, 255).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    starts = np.cumsum([0, *counts])
    return [
        encode_mp4(frames_THWC[start : start + count], fps)
        for start, count in zip(starts, counts, strict=False)
    ]


JOIN = "return b64(new Uint8Array(await new Blob(m.joinMp4(a[0].map(raw))).arrayBuffer()))"


@pytest.mark.parametrize("counts", [[9], [9, 12], [9, 12, 12, 12], [1, 1, 12], [3, 40, 2]])
@pytest.mark.parametrize("fps", [16, 24, 29.97])
def test_joined_chunks_are_one_video(module_page: Page, counts: list[int], fps: float) -> None:
    """Chunks are joined into one video file, which starts with its index. The file's frames are in
    order, evenly timed, and bit-identical to the chunks' frames.
    """
    files = clips(counts, fps)
    joined = base64.b64decode(
        module_page.call("/omni/js/mp4.js", JOIN, [b64(file) for file in files])
    )
    frames_THWC, rate = decode_mp4(joined)
    expected_THWC = np.concatenate([decode_mp4(file)[0] for file in files])
    assert np.array_equal(frames_THWC, expected_THWC)
    assert rate == pytest.approx(fps, rel=1e-3)
    assert joined.index(b"moov") < joined.index(b"mdat")
    with av.open(io.BytesIO(joined)) as container:
        stream = container.streams.video[0]
        assert stream.frames == sum(counts)
        times = [float(frame.time) for frame in container.decode(stream)]
        assert float(stream.duration * stream.time_base) == pytest.approx(
            sum(counts) / fps, abs=0.5 / fps
        )
    assert times[0] == 0
    assert np.allclose(np.diff(times), 1 / fps, atol=1e-3)


def test_a_joined_video_is_seekable(module_page: Page) -> None:
    """A player can seek in a joined video, because the index lists a key frame at the start of each
    chunk.
    """
    joined = base64.b64decode(
        module_page.call("/omni/js/mp4.js", JOIN, [b64(file) for file in clips([9, 12, 12])])
    )
    with av.open(io.BytesIO(joined)) as container:
        stream = container.streams.video[0]
        container.seek(int(24 / 16 / stream.time_base), stream=stream, backward=True)
        assert float(next(container.decode(stream)).time) == pytest.approx(21 / 16)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([], "nothing"),
        ([b"not a video at all"], ""),
        ([*clips([9]), *clips([9], size=(48, 48))], "size"),
        ([*clips([9]), *clips([9], fps=24)], "rate"),
        ([clips([9])[0][:400]], ""),
    ],
)
def test_videos_that_cannot_be_joined_are_refused_with_a_reason(
    module_page: Page, files: list[bytes], why: str
) -> None:
    code = (
        f"try {{ {JOIN} }} catch (e) {{ return e instanceof m.Mp4Error ? e.message : "
        f"'unexpected ' + e; }}"
    )
    message = module_page.call("/omni/js/mp4.js", code, [b64(file) for file in files])
    assert not message.startswith("unexpected")
    assert why in message


# ---- walking
# --------------------------------------------------------------------------------------------------

STILL = dict.fromkeys(("forward", "right", "up", "yaw", "pitch"), 0)


def frames(page: Page, count: int, speed: float = 1, **reading: Any) -> list[Any]:
    """Return the actions of each latent frame. Missing keys of `held` and `taps` are set to
    zero.
    """
    held, taps = {**STILL, **reading.pop("held", {})}, {**STILL, **reading.pop("taps", {})}
    full = {"held": held, "taps": taps, "turnYaw": 0, "turnPitch": 0, **reading}
    how = {"speed": speed, "turnSpeed": speed, "space": SPACE.as_json()}
    return page.call(
        "/omni/js/walking.js", "return m.walkingFrames(a[0], a[1], a[2])", full, count, how
    )


def test_keys_move_as_the_reference_does(module_page: Page) -> None:
    """In one latent frame, W moves the camera one step forward, L turns it 6 degrees to the right,
    and I turns it 4 degrees up. The walking or turning speed scales each of these amounts.
    """
    assert frames(module_page, 2, held={"forward": 1}) == [{"axes": {"forward": 1}}] * 2
    assert frames(module_page, 1, held={"yaw": 1, "pitch": 1}) == [{"axes": {"yaw": 6, "pitch": 4}}]
    assert frames(module_page, 1, 2, held={"right": -1, "yaw": -1}) == [
        {"axes": {"right": -2, "yaw": -12}}
    ]
    assert frames(module_page, 1) == [[]]


def test_walking_is_no_faster_diagonally(module_page: Page) -> None:
    [frame] = frames(module_page, 1, held={"forward": 1, "right": 1})
    assert frame["axes"] == {
        "forward": pytest.approx(math.sqrt(0.5)),
        "right": pytest.approx(math.sqrt(0.5)),
    }


def test_a_tap_is_one_latent_frame(module_page: Page) -> None:
    """However short a tap is, it counts as one full latent frame of the chunk's three."""
    assert frames(module_page, 3, taps={"forward": 1}) == [{"axes": {"forward": 1}}, [], []]


def test_a_drag_is_spread_over_the_chunk(module_page: Page) -> None:
    """A drag is spread over a chunk's latent frames, so each latent frame's value stays in
    range.
    """
    assert (
        frames(module_page, 3, turnYaw=30, turnPitch=-6) == [{"axes": {"turn": 10, "look": -2}}] * 3
    )
    assert frames(module_page, 1, turnYaw=300) == [{"axes": {"turn": 90}}]


def test_the_server_accepts_every_frame(module_page: Page) -> None:
    """The server accepts every action frame that the page sends, even with the sliders at their
    highest speeds, every key held and a drag.
    """
    held = dict.fromkeys(STILL, 1)
    [frame] = frames(module_page, 1, 4, held=held, turnYaw=1e4, turnPitch=-1e4)
    check_frame(SPACE, msgspec.convert(frame, ActionFrame))


def places(
    page: Page, rows: list[list[float]], count: int, before: dict[str, float] | None
) -> list[Any]:
    return page.call(
        "/omni/js/walking.js", "return m.placesOf(a[0], a[1], a[2])", rows, count, before
    )


def test_world_poses_become_a_position_for_each_video_frame(module_page: Page) -> None:
    """A pose belongs to the last video frame of its latent frame. Positions of video frames between
    two poses are interpolated linearly.
    """
    rows = [[1.0, 2.0, 350.0, 0.0], [1.0, 4.0, 10.0, 8.0]]
    first = places(module_page, rows, 5, None)
    assert [position["z"] for position in first] == pytest.approx([2, 2.5, 3, 3.5, 4])
    assert [math.degrees(position["yaw"]) for position in first] == pytest.approx(
        [350, 355, 360, 365, 370]
    )
    later = places(module_page, rows, 8, {"x": 0, "z": 2, "yaw": math.radians(350), "pitch": 0})
    assert [position["x"] for position in later] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    assert [math.degrees(position["pitch"]) for position in later] == pytest.approx(
        [0, 0, 0, 0, 2, 4, 6, 8]
    )
    assert len(places(module_page, rows[:1], 1, None)) == 1


def test_a_position_is_a_start_pose(module_page: Page) -> None:
    """A position is converted to a start pose with the same values, except that the heading is
    wrapped to the range from 0 to 360 degrees.
    """
    code = "return m.startPoseOf(m.placeOf(a[0]))"
    pose = module_page.call("/omni/js/walking.js", code, [1.5, -2.0, -90.0, 12.0])
    assert msgspec.convert(pose, StartPose) == StartPose(
        x_m=1.5, z_m=-2.0, heading_degrees=270.0, pitch_degrees=12.0
    )


# ---- the check for broken images
# ---------------------------------------------------------------------------------------

WATCH = """const watch = new m.Watch(); let now = 0; const seen = [];
    for (const [quiet, lively, count] of a[0]) {
        for (let i = 0; i < count; i++) { now += 250; watch.add({ quiet, lively }, now); }
        seen.push([watch.isGood, watch.isBroken(now)]);
    }
    return seen;"""


@pytest.mark.parametrize(
    ("quiet", "lively"), [(0.1, 0.4), (0.3, 2.6), (6.1, 18)], ids=["dark", "fog", "a mosaic"]
)
def test_an_image_that_stays_broken_is_noticed_after_three_seconds(
    module_page: Page, quiet: float, lively: float
) -> None:
    """Broken images are detected only if they stay broken for three seconds. The test shows normal
    images, broken images for two seconds, one normal image, and then broken images for longer.
    """
    usual, bad = (0.5, 10), (quiet, lively)
    parts = [(*usual, 12), (*bad, 8), (*usual, 1), (*bad, 8), (*bad, 8)]
    seen = module_page.call("/omni/js/watch.js", WATCH, parts)
    assert seen == [[True, False], [False, False], [True, False], [False, False], [False, True]]


def test_walls_and_seasons_are_not_taken_for_broken(module_page: Page) -> None:
    """Images are not taken for broken if they have as little or as much detail as any in 99 % of
    the village views, or as much as images in another style.
    """
    parts = [(0.5, 10.2, 12), (0, 3.3, 40), (2.9, 19.9, 40), (0.3, 6, 40)]
    assert module_page.call("/omni/js/watch.js", WATCH, parts) == [[True, False]] * 4


def test_a_world_that_starts_flat_is_not_taken_for_broken(module_page: Page) -> None:
    parts = [(0, 0.1, 12), (9, 20, 40), (0, 0, 40)]
    assert module_page.call("/omni/js/watch.js", WATCH, parts) == [[True, False]] * 3


def test_detail_is_measured_in_the_parts_of_an_image(module_page: Page) -> None:
    """Detail is measured separately in each part of the image. The test image has stripes with the
    values 0 and 100 in its left half, and a uniform right half.
    """
    code = """const data = new Uint8ClampedArray(4 * 80 * 48).map((_, i) => {
        const x = (i >> 2) % 80; return i % 4 === 3 ? 255 : x < 40 && x % 2 ? 100 : 0; });
        return [m.measure(data), m.measure(data.fill(70))]"""
    stripes, flat = module_page.call("/omni/js/watch.js", code)
    assert stripes == {"quiet": 0, "lively": pytest.approx(100, rel=1e-4)}
    assert flat == {"quiet": 0, "lively": 0}


# ---- pacing and playing
# ---------------------------------------------------------------------------------------------


def test_the_next_chunk_is_requested_in_time(module_page: Page) -> None:
    """Until waiting times have been measured, the next chunk is requested immediately. After that,
    it is requested as late as the measured waiting time and the margin allow.
    """
    code = """const pacer = new m.Pacer(); pacer.marginMs = 100; const before = pacer.isTime(10000, 0);
        for (let i = 0; i < 20; i++) pacer.add(300, 12);
        return [before, pacer.isTime(1000, 0), pacer.isTime(390, 0), pacer.isTime(0, 1), pacer.supply()]"""  # noqa: E501
    assert module_page.call("/omni/js/pacer.js", code) == [
        True,
        False,
        True,
        False,
        pytest.approx(40),
    ]


NEEDED = """const pacer = new m.Pacer(); pacer.marginMs = 0;
    return a[0].map((ms, i) => { pacer.add(ms, i ? a[1] : 1); return [pacer.neededMs, pacer.supply()]; })"""  # noqa: E501


@pytest.mark.parametrize(
    "numbers", [[9000, 300, 300], [9000, 8000, 300], [300, 9000, 300], [50, 300, 300]]
)
def test_the_waiting_time_is_known_after_three_chunks(
    module_page: Page, numbers: list[int]
) -> None:
    """Compilation makes the first or second chunk slow. After three chunks, the waiting time is
    computed from the chunks that were not slow.
    """
    for frames in (4, 12):
        *_, (needed_ms, supply) = module_page.call("/omni/js/pacer.js", NEEDED, numbers, frames)
        assert needed_ms == pytest.approx(300)
        assert supply == pytest.approx(frames / 0.3)


def test_frames_that_arrive_separately_shorten_the_waiting_time(module_page: Page) -> None:
    """Frames that arrive separately shorten the waiting time, because playback can start as soon as
    the first frame arrives. The server's frame rate is still computed from the times of whole
    chunks.
    """
    code = """const pacer = new m.Pacer(); pacer.marginMs = 0;
        for (let i = 0; i < 20; i++) pacer.add(400, 12, 250);
        return [pacer.neededMs, pacer.supply()]"""
    assert module_page.call("/omni/js/pacer.js", code) == [pytest.approx(250), pytest.approx(30)]


def test_the_buffer_ignores_one_late_chunk_and_follows_a_slower_server(
    module_page: Page,
) -> None:
    """One chunk that takes three seconds does not change the buffer length. A server that has
    become slower is detected at its third slow chunk.
    """
    needed = [
        ms
        for ms, _ in module_page.call(
            "/omni/js/pacer.js", NEEDED, [300] * 8 + [3000] + [300] * 3, 12
        )
    ]
    assert max(needed) == pytest.approx(300)
    needed = [
        ms for ms, _ in module_page.call("/omni/js/pacer.js", NEEDED, [300] * 8 + [600] * 8, 12)
    ]
    assert needed[10] >= 600
    assert needed[-1] == pytest.approx(600)


PLAY = """
    const canvas = new OffscreenCanvas(16, 16); canvas.getContext("2d").fillRect(0, 0, 16, 16);
    const jpeg = new Uint8Array(await (await canvas.convertToBlob({ type: "image/jpeg" })).arrayBuffer());
    const player = new m.Player(canvas); player.fps = 16; const drawn = []; let now = 0;
    player.onframe = ({ tag, index }) => drawn.push([tag, index, now]);
    const decoded = (file) => self.createImageBitmap(new Blob([file])).catch(() => null);
    const push = async (tag) => { const before = player.numBuffered;
        player.push(new Array(12).fill(jpeg).map(decoded), tag); player.numBuffered === before + 12 || drawn.push("lost");
        for (let i = 0; i < 200 && player.numReady < before + 12; i++) await new Promise((r) => setTimeout(r, 5)); };
    const run = (seconds) => { for (const end = now + 1000 * seconds; now < end; now += 1000 / 60) player.tick(now); };
"""  # noqa: E501


def test_frames_are_shown_evenly_and_in_order(module_page: Page) -> None:
    """At 16 frames per second on a 60 Hz display, each frame is shown for 3 or 4 refreshes,
    including across chunk boundaries.
    """
    code = "for (const tag of [0, 1, 2]) await push(tag); run(3); return [drawn, player.numStalls]"
    drawn, stalls = module_page.call("/omni/js/player.js", PLAY + code)
    assert [frame[:2] for frame in drawn] == [
        [tag, index] for tag in range(3) for index in range(12)
    ]
    gaps_ms = np.diff([time for _, _, time in drawn])
    assert gaps_ms.min() > 45
    assert gaps_ms.max() < 70
    assert stalls == 1  # the only stall is after the last frame


def test_the_buffer_counts_the_frame_that_is_shown(module_page: Page) -> None:
    """`bufferedMs` is the time until playback has to wait. A chunk that arrives just within that
    time does not interrupt playback. A chunk that arrives one refresh later does.
    """
    code = """await push(0); run(0.4); const ms = player.bufferedMs; run(ms / 1000 - a[0] / 60);
        const early = player.numStalls; await push(1); run(0.1); return [early, player.numStalls]"""
    assert module_page.call("/omni/js/player.js", PLAY + code, 1) == [0, 0]
    assert module_page.call("/omni/js/player.js", PLAY + code, -1) == [1, 1]


def test_a_player_that_expects_no_more_does_not_stall(module_page: Page) -> None:
    code = "player.isResting = true; await push(0); run(3); return [drawn.length, player.numStalls]"
    assert module_page.call("/omni/js/player.js", PLAY + code) == [12, 0]


def test_a_slow_supply_slows_the_image_evenly(module_page: Page) -> None:
    """When frames arrive at half the playback frame rate, the video plays at about half speed
    without stopping.
    """
    code = (
        "player.setSupply(8); for (const tag of [0, 1]) await push(tag); run(2.5); return "
        "[drawn, player.numStalls]"
    )
    drawn, stalls = module_page.call("/omni/js/player.js", PLAY + code)
    gaps_ms = np.diff([time for _, _, time in drawn])
    assert stalls == 0
    assert 110 < gaps_ms.min() <= gaps_ms.max() < 145


def test_a_decoded_frame_does_not_wait_for_later_ones(module_page: Page) -> None:
    """A decoded frame is shown when its turn comes, without waiting for later frames. A frame that
    cannot be decoded is skipped.
    """
    code = """
        const decode = createImageBitmap; const waiting = [];
        self.createImageBitmap = (blob) =>
            new Promise((done, fail) => waiting.push([() => decode(blob).then(done), fail]));
        player.push([jpeg, jpeg, jpeg, jpeg].map(decoded), 0); self.createImageBitmap = decode;
        const soon = () => new Promise((r) => setTimeout(r, 50)); const ready = [];
        waiting[1][0](); await soon(); ready.push(player.numReady);
        waiting[0][0](); await soon(); ready.push(player.numReady, player.numBuffered);
        waiting[2][1](new Error("broken")); waiting[3][0](); await soon(); ready.push(player.numReady);
        run(1); return [ready, drawn.map(([, index]) => index)];"""  # noqa: E501
    ready, drawn = module_page.call("/omni/js/player.js", PLAY + code)
    assert ready == [0, 2, 4, 3]
    assert drawn == [0, 1, 3]


def test_short_touches_are_not_lost_and_held_keys_are_not_doubled(module_page: Page) -> None:
    """A key pressed and released between two reads of the controls counts as a tap, and a key that
    is still down counts as held. Opposite keys cancel each other out.
    """
    code = """const c = new m.Controls(); c.press("KeyW", "forward", 1); c.release("KeyW"); c.press("KeyD", "right", 1);
        c.press("KeyL", "yaw", 1); c.press("KeyJ", "yaw", -1); c.turn(0.5, 0);
        const one = c.take(); const two = c.take();
        return [one.taps.forward, one.taps.right, one.held.right, one.held.yaw, one.turnYaw, one.inputAt !== null,
                two.taps.forward, two.held.right, two.turnYaw, two.inputAt]"""  # noqa: E501
    assert module_page.call("/omni/js/input/controls.js", code) == [
        1,
        0,
        1,
        0,
        0.5,
        True,
        0,
        1,
        0,
        None,
    ]


# ---- the world
# --------------------------------------------------------------------------------------------------

WORLD = """
const {World} = await import('/omni/js/world.js');
const link = new EventTarget();
[link.hello, link.isUp, link.sent] = [{session_id: 's'}, true, []];
link.send = (message) => link.sent.push(message);
const world = new World(link);
const told = [];
for (const name of ['chunk', 'resumed', 'rewound', 'trouble']) {
  world.addEventListener(name, ({detail}) => told.push([name, detail.message?.chunk_index ?? null]));
}
const hear = (message) => link.dispatchEvent(new CustomEvent('message', {detail: {message}}));
"""  # noqa: E501


def test_a_session_that_went_back_continues_from_there(module_page: Page) -> None:
    """If a restarted server resumes a session at an earlier chunk, later chunks count as new again,
    and pending requests are dropped.
    """
    script = (
        WORLD
        + """
    const {Link} = await import('/omni/js/link.js');
    const asked = [];
    const pack = Link.pack;
    Link.pack = (message) => { asked.push(message.request_id); return pack(message); };
    try {
      world.begin();
      const answer = (index) => hear(
        {type: 'frame', request_id: asked.shift(), session_id: 's', chunk_index: index, final: true});
      for (let index = 0; index < 4; index++) { world.ask({steering: {actions: []}}); answer(index); }
      world.ask({steering: {actions: []}});
      asked.shift();
      link.dispatchEvent(new CustomEvent('down', {detail: {}}));
      link.dispatchEvent(new CustomEvent('up', {detail: {hello: {}}}));
      const resume = link.sent.at(-1);
      const before = link.sent.length;
      hear({type: 'resumed', session_id: 's', next_chunk_index: 2, replayed: 0});
      const again = link.sent.length - before;
      world.ask({steering: {actions: []}});
      answer(2);
      return {told, last: resume.last_chunk_id, again, lastChunk: world.lastChunk, pending: world.numPending};
    } finally { Link.pack = pack; }
    """  # noqa: E501
    )
    seen = module_page.run(f"(async () => {{{script}}})()")
    assert seen["told"] == [
        *(["chunk", index] for index in range(4)),
        ["rewound", None],
        ["resumed", None],
        ["chunk", 2],
    ]
    assert (seen["last"], seen["again"], seen["lastChunk"], seen["pending"]) == (3, 0, 2, 0)


# ---- decode
# --------------------------------------------------------------------------------------------------

DECODE = """
    const decoder = new m.H264Decoder(); decoder.name = a[1]; const canvas = new OffscreenCanvas(64, 48);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const show = async (unit) => { const bitmap = await decoder.decode(unit); if (!bitmap) return null;
        context.drawImage(bitmap, 0, 0); bitmap.close(); return context.getImageData(32, 24, 1, 1).data[1]; };
    const units = a[0].map((unit) => ({ ...unit, video: raw(unit.video) }));
"""  # noqa: E501


def grey_units(brightness: list[int], keys: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    """Return access units of grey frames in the form that the server sends, with key frames at the
    indices `keys`.
    """
    encoder = H264Encoder("libx264", 16.0)
    units = []
    for frame, level in enumerate(brightness):
        if frame in keys:
            encoder.request_key_frame()
        frames_THWC = np.full((1, 48, 64, 3), level, np.uint8)
        (part,) = encoder.encode(
            stamped_frames(frames_THWC, chunk_index=0, first_frame=frame, fps=16.0, input_id=None)
        )
        data = bytes(part.data)
        size = {"width": part.width, "height": part.height}
        fields = access_unit_fields(part)
        units.append({"video": b64(data), "first_frame": frame, **size, **fields})
    return units


@pytest.fixture
def h264_page(module_page: Page) -> Page:
    if module_page.call("/omni/js/decode.js", "return m.h264Decoder(16)") is None:
        pytest.skip("this Chromium was built without H.264")
    return module_page


every_decoder = pytest.mark.parametrize("decoder", ["WebCodecs", "MSE"])


@every_decoder
def test_access_units_are_decoded_one_by_one(h264_page: Page, decoder: str) -> None:
    """The decoder returns each frame before the next access unit is sent, so it adds no delay."""
    levels = [20, 60, 100, 140, 180, 220]
    code = (
        "const seen = []; for (const unit of units) seen.push(await show(unit)); return "
        "[seen, decoder.numFailures];"
    )
    seen, failures = h264_page.call(
        "/omni/js/decode.js", DECODE + code, grey_units(levels), decoder
    )
    np.testing.assert_allclose(seen, levels, atol=3)
    assert failures == 0


@every_decoder
def test_frames_after_a_lost_one_wait_for_a_key_frame(h264_page: Page, decoder: str) -> None:
    """After a lost frame, the decoder reports that it needs a key frame. It returns no frame that
    depends on the lost frame.
    """
    code = """const seen = []; const needs = [];
        for (const unit of units) { if (unit.first_frame === 2) continue;
            seen.push(await show(unit)); needs.push(decoder.needsKey); }
        return [seen, needs];"""
    units = grey_units([20, 60, 100, 140, 180, 220], keys=(0, 4))
    seen, needs = h264_page.call("/omni/js/decode.js", DECODE + code, units, decoder)
    assert seen[2] is None
    np.testing.assert_allclose([seen[0], seen[1], *seen[3:]], [20, 60, 180, 220], atol=3)
    assert needs == [False, False, True, False, False]


@every_decoder
def test_a_decoder_that_fails_twice_is_no_longer_used(h264_page: Page, decoder: str) -> None:
    """A decoder that has failed twice is no longer used, and the page requests JPEG."""
    code = """
        const broken = { video: new Uint8Array(200).fill(7), is_key_frame: true, first_frame: 0,
            codec_string: units[0].codec_string, width: 64, height: 48 };
        const seen = [await show(broken), await show(broken)];
        return [seen, decoder.hasFailed];"""
    assert h264_page.call("/omni/js/decode.js", DECODE + code, grey_units([9]), decoder) == [
        [None, None],
        True,
    ]


def test_mse_keeps_order_and_exact_frames_of_a_burst(h264_page: Page) -> None:
    """If many access units arrive together, their frames are returned in order, each with its own
    brightness.
    """
    levels = [(37 * frame) % 200 + 20 for frame in range(24)]
    code = """const seen = await Promise.all(units.map((unit) => show(unit)));
        return [seen, decoder.numFailures];"""
    seen, failures = h264_page.call("/omni/js/decode.js", DECODE + code, grey_units(levels), "MSE")
    np.testing.assert_allclose(seen, levels, atol=3)
    assert failures == 0


def test_mse_keeps_no_more_than_what_follows_a_key_frame(h264_page: Page) -> None:
    """The decoder requests a key frame after 4 MiB, and removes all data before that key frame from
    its buffer.
    """
    code = """
        let asked = 0; const kept = [];
        for (let round = 0; round < 6; round++) for (const unit of units) {
            const padded = new Uint8Array(unit.video.length + 900_000);  // filler data
            padded.set(unit.video); padded.set([0, 0, 1, 12], unit.video.length);
            padded.fill(255, unit.video.length + 4);
            const next = { ...unit, video: padded, first_frame: unit.first_frame + round * units.length };
            (await decoder.decode(next)).close();
            asked += decoder.wantsKey; kept.push(decoder.bufferedS); }
        return [asked, kept, decoder.numFailures];"""  # noqa: E501
    units = grey_units([20, 60, 100, 140, 180, 220])
    asked, kept, failures = h264_page.call("/omni/js/decode.js", DECODE + code, units, "MSE")
    assert asked == 6 * 2
    assert max(kept) <= 13 * 0.033
    assert failures == 0


@pytest.mark.parametrize(
    ("gone", "fps", "decoder"),
    [
        ([], 16, "WebCodecs"),
        (["VideoDecoder"], 16, "MSE"),
        (["VideoDecoder"], 60, None),
        (["VideoDecoder", "MediaSource"], 16, None),
    ],
)
def test_the_decoder_is_the_first_that_the_browser_has(
    h264_page: Page, gone: list[str], fps: int, decoder: str | None
) -> None:
    code = """const kept = a[0].map((name) => [name, globalThis[name]]);
        for (const [name] of kept) globalThis[name] = undefined;
        try { return await m.h264Decoder(a[1]); } finally {
            for (const [name, value] of kept) globalThis[name] = value; }"""
    assert h264_page.call("/omni/js/decode.js", code, gone, fps) == decoder
