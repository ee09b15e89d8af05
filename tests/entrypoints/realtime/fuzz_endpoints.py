# SPDX-License-Identifier: Apache-2.0
"""Fuzz the decoders and parsers of all realtime endpoints with mutated messages.

python tests/entrypoints/realtime/fuzz_endpoints.py --count 10000000

Each case is one message. The script decodes the message and, if that succeeds, parses it with each
endpoint's parser. Only `CodecError` and `EndpointError` may be raised, no case may take longer than
`SLOWEST_MS` of CPU time, and resident memory must not grow. The script prints the counts as JSON.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))  # to import `helpers` when run as a script
from helpers.fake_engine import infer
from helpers.live_clients import png
from test_codec import SEEDS, mutated

from vllm_omni.actions import CAMERA_SPACE, Axis
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.codec import (
    CodecError,
    MessageDialect,
    decode,
    encode,
)
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.generate import protocol as generate_protocol
from vllm_omni.entrypoints.realtime.video import protocol as video_protocol
from vllm_omni.entrypoints.realtime.world_camera import protocol

SLOWEST_MS = 250.0
"""Maximum CPU time of a case in milliseconds. The limit is far above the slowest case measured
(about 10 ms), because the operating system may suspend the process on a busy machine.
"""
GROWTH_BYTES = 5e6

_LIMITS = EndpointLimits()
_EXTENSIONS = generate_protocol.EXTENSIONS
_SPACE = msgspec.structs.replace(
    CAMERA_SPACE,
    axes=(
        Axis(name="yaw", title="turn", unit="pixels", kind="motion", mouse="x"),
        Axis(name="throttle", title="speed", unit="of full speed", low=-1, high=1),
    ),
    scroll=True,
)
_EVENTS = generate_protocol.EventReader(_LIMITS, _SPACE, _EXTENSIONS)
_FRAMES = [["w"], {"buttons": ["w", "l"], "axes": {"yaw": 1.5, "throttle": -1}, "scroll": 1.0}, []]
_STATES = {
    "mode": "state",
    "transitions": [
        {"buttons": ["w"], "client_ts_ms": 1.5},
        {"axes": {"yaw": -3, "throttle": 0.5}, "scroll": -1},
    ],
}
_pack = msgspec.msgpack.encode

BINARY_SEEDS = [
    *SEEDS,
    *(encode(infer(image=np.zeros((2, 2, 3), np.uint8)), dialect) for dialect in MessageDialect),
    encode({"endpoint": "branch", "session_id": "a", "new_session_id": "b"}),
    _pack(
        {
            "type": "init",
            "prompt": "a path",
            "size": "832x480",
            "fps": 25,
            "seed": 100000.0,
            "num_frames": 9.0,
            "max_chunks": 3,
            "first_frame": png()[:60],
            "realtime_output_format": "webp",
            "output_compression": 80,
            "condition_inputs": {"camera_actions": [["w"], ["w", "l"], []]},
            "extensions": list(_EXTENSIONS),
        }
    ),
    _pack(
        {
            "type": "event",
            "kind": "camera_actions",
            "payload": [["w"], [], ["a", "d"]],
            "event_id": 7,
        }
    ),
    _pack(
        {
            "type": "event",
            "kind": "camera_actions",
            "payload": {
                "mode": "state",
                "transitions": [{"actions": ["w"], "client_ts_ms": 1.5}, {"actions": []}],
            },
            "event_id": 70000.0,
        }
    ),
    _pack({"type": "event", "kind": "prompt", "payload": "rain \u00e9\u4e16", "event_id": None}),
    _pack(
        {
            "type": "event",
            "kind": "composite_input",
            "payload": {
                "input_types": ["prompt", "camera_actions"],
                "prompt": "x",
                "camera_actions": [["w"]],
            },
        }
    ),
    _pack({"type": "event", "kind": "actions", "payload": _FRAMES, "event_id": 8}),
    _pack({"type": "event", "kind": "actions", "payload": _STATES, "event_id": 9}),
    encode(infer(cameras=None, actions=_FRAMES)),
    _pack({"type": "control", "op": "reset", "id": 5}),
    _pack({"type": "credit", "chunks": 5}),
    _pack({"type": "ping", "t": 1.25}),
]
TEXT_SEEDS = [
    json.dumps(value).encode()
    for value in (
        {
            "type": "session.start",
            "prompt": "a path",
            "width": 832,
            "height": 480,
            "num_frames": 33,
            "fps": 16.0,
            "image_reference": {"image_url": "data:image/png;base64,AAAA"},
            "extra_params": {"camera_action_script": [["w"], "wl"], "pace_to_media_time": True},
            "sampling_params": {"seed": 5},
        },
        {
            "type": "session.interaction",
            "interaction": {
                "event_id": "e",
                "transition_chunks": 2,
                "event": {
                    "prompt": "rain",
                    "multi_modal_data": {
                        "camera": {
                            "mode": "target",
                            "data": {"translation": [0, 0.5, 1e3], "rotation": [0, 0, 0, 1]},
                        }
                    },
                },
            },
        },
        {"type": "session.start", "prompt": "a path", "extra_params": {"action_script": _FRAMES}},
        {
            "type": "session.interaction",
            "interaction": {"event_id": "f", "event": {"multi_modal_data": {"actions": _STATES}}},
        },
        {"type": "session.ping"},
    )
]


def take_binary(data: bytes) -> None:
    """Decode and parse a message as both msgpack endpoints do before they look up a session."""
    value = decode(data).value
    refusals = 0
    for parse in (
        lambda: protocol.parse(value, _LIMITS),
        lambda: generate_protocol.parse_init(value, _LIMITS, _SPACE),
        lambda: generate_protocol.parse_extra(value, _EXTENSIONS),
        lambda: _EVENTS.read_event(value),
    ):
        try:
            message = parse()
            if isinstance(message, protocol.InferMessage):
                message.camera_path(max_poses=100, size=(832, 480))
                message.script(_SPACE)
        except EndpointError:
            refusals += 1
    if refusals == 4:
        raise EndpointError("invalid_request", "no endpoint accepts it")


def take_text(data: bytes) -> None:
    """Decode and parse a message as the JSON endpoint does."""
    text = data.decode("utf-8", "strict")
    value = video_protocol.decode(text, video_protocol.MAX_CONTROL_BYTES, "message")
    if value.get("type") == "session.start":
        video_protocol.parse_start(value, _LIMITS, _SPACE).script(_SPACE)
    else:
        video_protocol.parse_interaction(value, _LIMITS, _SPACE)


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Run `count` cases and return the counts. Undocumented exceptions propagate."""
    random_ = random.Random(seed)
    outcomes: Counter[str] = Counter()
    slowest_ms, rss = 0.0, 0
    process = psutil.Process()
    for number in range(count):
        if number == count // 2:
            rss = process.memory_info().rss  # the first half of the cases is the warm-up
        is_text = random_.random() < 0.2
        data = mutated(random_.choice(TEXT_SEEDS if is_text else BINARY_SEEDS), random_)
        started_s = time.thread_time()
        try:
            (take_text if is_text else take_binary)(data)
            outcomes["accepted"] += 1
        except CodecError:
            outcomes["not msgpack"] += 1
        except EndpointError:
            outcomes["refused"] += 1
        except UnicodeDecodeError:
            assert is_text  # the WebSocket library would have closed the connection with 1007
            outcomes["not UTF-8"] += 1
        slowest_ms = max(slowest_ms, (time.thread_time() - started_s) * 1e3)
    grown = process.memory_info().rss - rss
    return {
        "cases": count,
        "seed": seed,
        **outcomes,
        "slowest_ms": round(slowest_ms, 2),
        "grown_bytes": grown,
    }


def check(result: dict[str, Any]) -> None:
    assert result["slowest_ms"] < SLOWEST_MS, result
    assert result["grown_bytes"] < GROWTH_BYTES, result
    assert result["accepted"] > result["cases"] / 100, result  # some mutated messages are valid


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    started_s = time.monotonic()
    result = fuzz(args.count, args.seed)
    print(json.dumps({**result, "seconds": round(time.monotonic() - started_s, 1)}))
    check(result)


if __name__ == "__main__":
    main()
