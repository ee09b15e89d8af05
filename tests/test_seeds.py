# SPDX-License-Identifier: Apache-2.0
"""Every endpoint accepts seeds from 0 to 2**64 - 1.

For seed -1, the endpoint generates a random seed, returns it and records it.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.openai.chat_request import read_chat
from vllm_omni.entrypoints.openai.protocol import ImageGenerationRequest, VideoRequest, read_request
from vllm_omni.entrypoints.realtime.generate import protocol
from vllm_omni.entrypoints.realtime.video import protocol as video_protocol
from vllm_omni.entrypoints.realtime.world_camera.protocol import ExtraBody
from vllm_omni.entrypoints.speech.protocol import SpeechRequest
from vllm_omni.inputs import DiffusionParams
from vllm_omni.seeds import MAX_SEED, chosen_seed, definite_seed, nth_seed


def chat(seed: int) -> Any:
    return read_chat({"messages": [{"role": "user", "content": "what?"}], "seed": seed}, "m")


READERS: dict[str, Callable[[int], Any]] = {
    "images": lambda seed: read_request(ImageGenerationRequest, {"prompt": "p", "seed": seed}),
    "videos": lambda seed: read_request(
        VideoRequest, {"prompt": "p", "seed": str(seed)}, is_form=True
    ),
    "chat": chat,
    "speech": lambda seed: SpeechRequest(input="a", seed=seed),
    "camera": lambda seed: msgspec.convert({"seed": seed}, ExtraBody),
    "generate": lambda seed: msgspec.convert(
        {"type": "init", "prompt": "", "seed": seed}, protocol.InitMessage
    ),
    "video stream": lambda seed: msgspec.convert({"seed": seed}, video_protocol.StartMessage),
}


@pytest.mark.parametrize("endpoint", READERS)
def test_every_endpoint_takes_64_bits_and_minus_one(endpoint: str) -> None:
    """ComfyUI generates unsigned 64-bit seeds, and -1 is the default of many nodes. Every endpoint
    accepts both.
    """
    for seed in (0, 2**63 - 1, 2**63, MAX_SEED, -1):
        assert READERS[endpoint](seed).seed == seed
    for seed in (-2, MAX_SEED + 1, 2**70):
        with pytest.raises(
            (ApiError, ValidationError, msgspec.ValidationError), match=r"seed|18446744073709551615"
        ):
            READERS[endpoint](seed)


def test_minus_one_draws_and_other_seeds_stay() -> None:
    """For seed -1, a new seed is generated each time. Other seeds are used as given.

    If no seed is given, an endpoint leaves the choice to the model or generates a random seed.
    """
    drawn = {chosen_seed(-1) for _ in range(8)} | {definite_seed(None) for _ in range(8)}
    assert len(drawn) > 8 and all(seed is not None and 0 <= seed < 2**53 for seed in drawn)
    assert [chosen_seed(seed) for seed in (None, 0, MAX_SEED)] == [None, 0, MAX_SEED]
    assert definite_seed(MAX_SEED) == MAX_SEED


def test_the_seed_behind_the_largest_is_zero() -> None:
    """Result i of a request uses the request's seed plus i. The largest seed is followed by
    zero.
    """
    assert [nth_seed(MAX_SEED, number) for number in range(3)] == [MAX_SEED, 0, 1]


def test_the_engine_gets_the_whole_range_and_never_minus_one() -> None:
    """The engine accepts the whole range of seeds but never receives -1, because the endpoint
    generates the seed before it sends the request.

    A recording therefore contains the actual seed and can be replayed.
    """
    params = DiffusionParams(session_id="s", seed=MAX_SEED)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params.to_pooling_params().extra_kwargs))
    assert DiffusionParams.from_extra_kwargs(sent).seed == MAX_SEED
    with pytest.raises(ValueError, match="2\\*\\*64 - 1"):
        DiffusionParams(session_id="s", seed=MAX_SEED + 1)
    with pytest.raises(msgspec.ValidationError, match="seed"):
        msgspec.convert({"session_id": "s", "seed": -1}, DiffusionParams)
