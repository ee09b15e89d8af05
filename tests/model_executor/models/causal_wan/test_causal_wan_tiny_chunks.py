# SPDX-License-Identifier: Apache-2.0
"""Chunks that go to the tiny decoder (`omni.degradations` `tiny_vae`): frames, what a stream
holds, who can do it.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import (
    HEIGHT,
    WIDTH,
    Result,
    check_refusals,
    finish,
    input_video,
    load_model,
    make_request,
    open_session,
    step,
    stream,
)

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, SessionState
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import find_layout, hf_config
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan, StreamSetup
from vllm_omni.model_executor.models.wan.vae.vae import to_uint8

LADDER: dict[str, Any] = {"scheduling": "deadline", "degradations": ["tiny_vae"]}
CHUNKS = 6


@pytest.fixture(scope="module")
def model(causal_wan: Path) -> CausalWan:
    return load_model(causal_wan, serving=LADDER)


def start(
    model: CausalWan, session: SessionState, degraded: bool, **params: Any
) -> DiffusionRequest:
    """A chunk, up to where its frames would be made."""
    tensors = params.pop("tensors", None)
    request = make_request(session, tensors, **{"prompt": "a beach", **params})
    request.degradations = ("tiny_vae",) if degraded else ()
    model.prepare_encode(request)
    while request.step < request.num_steps:
        step(model, [request])
    return request


def run(
    model: CausalWan, tiny: Collection[int], chunks: int = CHUNKS
) -> tuple[list[Result], SessionState]:
    session = open_session(model)
    results = [finish(model, start(model, session, index in tiny)) for index in range(chunks)]
    return results, session


@pytest.mark.parametrize(
    ("options", "tiny"),
    [
        ({}, {0}),
        ({}, {1, 2, 4}),
        ({"cache": "noise_matched"}, {2, 3}),
        ({"latent_frames_per_chunk": 1, "window_frames": 6, "sink_frames": 1}, {3, 4}),
    ],
)
def test_frames_are_its_latents_decoded_so(
    causal_wan: Path, options: dict[str, Any], tiny: set[int]
) -> None:
    """Latents are those of a stream that was never degraded, and so are numbers and places of
    the frames.
    """
    model = load_model(causal_wan, serving=LADDER, **options)
    results, _ = run(model, tiny)
    assert model.decoder is not None
    state = None
    for index, (latents, (meta, tensors)) in enumerate(
        zip(stream(model, CHUNKS), results, strict=True)
    ):
        pixels, state = model.decoder.decode(latents[None], state, tiny=index in tiny)
        assert torch.equal(tensors["frames"], to_uint8(pixels))
        expected = model.plan.pixel_frames(index)
        assert (meta["first_frame"], meta["num_frames"]) == (expected.start, len(expected))
        assert tensors["frames"].shape[0] == len(expected)


def test_without_a_degraded_chunk_nothing_is_different(causal_wan: Path, model: CausalWan) -> None:
    """A server with the ladder makes the frames of one without, bit for bit, from 8 latent
    frames more a stream.
    """
    plain = load_model(causal_wan)
    for ours, theirs in zip(run(model, ())[0], run(plain, ())[0], strict=True):
        assert torch.equal(ours[1]["frames"], theirs[1]["frames"]) and ours[0] == theirs[0]
    params = DiffusionParams(session_id="a", prompt="a beach")
    cells = (HEIGHT // 8) * (WIDTH // 8)
    assert model.session_nbytes(params) - plain.session_nbytes(params) == 8 * 16 * cells * 4
    assert plain.decoder is not None and plain.tiny_vae is None


def test_bytes_are_constant_and_an_abandoned_chunk_and_a_fork_leave_no_trace(
    model: CausalWan,
) -> None:
    """Whichever decoder the chunk before, the abandoned one and the next one go to."""
    session = open_session(model)
    admitted = session.nbytes
    for index in range(CHUNKS):
        before = {name: tensor.clone() for name, tensor in session.tensors().items()}
        for degraded in (True, False):
            model.post_decode(start(model, session, degraded, prompt="a volcano"))
        after = session.tensors()
        assert after.keys() == before.keys() and all(
            torch.equal(after[name], before[name]) for name in after
        )
        fork = session.fork("b")
        ours, theirs = (
            finish(model, start(model, each, index % 3 == 1)) for each in (session, fork)
        )
        assert torch.equal(ours[1]["frames"], theirs[1]["frames"])
        session.to("cpu")
        state = session.decoder_cache  # type: ignore[attr-defined]
        assert session.nbytes == admitted and model.decoder is not None
        assert state.tiny == (index % 3 == 1) and state.nbytes <= model.decoder.state_nbytes(
            HEIGHT, WIDTH
        )
        assert state.newest.untyped_storage().nbytes() == state.newest.nbytes
    session.close()
    assert session.decoder_cache is None  # type: ignore[attr-defined]


def test_a_degraded_video_to_video_chunk_keeps_its_input(
    causal_wan: Path, model: CausalWan
) -> None:
    """The encoder's memory goes on as it does: only the frames that come out are the tiny
    decoder's.
    """
    found = []
    for tiny in ((), (1,)):
        session, latents = open_session(model, options={"source": "video"}), []
        for index in range(3):
            tensors = {"video": input_video(model.plan.pixel_frames(index))}
            request = start(
                model, session, index in tiny, tensors=tensors, options={"source": "video"}
            )
            finish(model, request)
            latents.append(request.state.latents)
        found.append(latents)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_stream_of_latents_goes_without_nothing(model: CausalWan) -> None:
    """There is no decode to save, so its result does not say that it was degraded."""
    session = open_session(model, output="latents")
    request = start(model, session, True, output="latents")
    finish(model, request)
    assert request.degradations == ()


def test_a_decoder_on_a_stage_separate_takes_turns_as_well(
    causal_wan: Path, model: CausalWan
) -> None:
    """`omni.vae_stage`: the rank with layers has neither decoder and holds nothing for them."""
    serving = {**LADDER, "vae_stage": True}
    layers = load_model(causal_wan, ParallelContext(vae_stage=True), serving=serving)
    vae = load_model(causal_wan, ParallelContext(stage=1, vae_stage=True), serving=serving)
    assert layers.decoder is None and layers.tiny_vae is None and vae.tiny_vae is not None
    expected, whole = run(model, {1, 2}, 4)
    ours, theirs = open_session(layers), open_session(vae)
    assert ours.nbytes + theirs.nbytes == whole.nbytes
    for index in range(4):
        made = start(layers, ours, index in {1, 2})
        decoded = make_request(theirs, prompt="a beach")
        decoded.degradations = ("tiny_vae",) if index in {1, 2} else ()
        vae.prepare_encode(decoded)
        vae.unpack_decode_state(
            decoded, layers.latents(made).clone(), layers.pack_decode_state(made)
        )
        frames = finish(vae, decoded)[1]["frames"]
        layers.commit(made)
        assert torch.equal(frames, expected[index][1]["frames"])


def test_without_its_weights_a_server_does_not_start_and_says_what_they_are_for(
    causal_wan: Path,
) -> None:
    """On every rank, also on one that would not decode."""
    layout = dataclasses.replace(find_layout(causal_wan), tiny_vae=None)
    for parallel in (ParallelContext(), ParallelContext(vae_stage=True)):
        for serving, options, who in (
            (LADDER, {}, "omni.degradations 'tiny_vae'"),
            ({}, {"decoder": "tiny"}, "omni.model.decoder 'tiny'"),
        ):
            omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options, **serving)
            setup = StreamSetup.of_checkpoint(
                hf_config(causal_wan)["causal_wan"], layout, omni, torch.float32, parallel
            )
            with pytest.raises(ValueError, match=f"lacks taew2_1.pth, which {who} needs"):
                CausalWan(setup).load_checkpoint(layout)


def test_both_degradations_are_supported_together(causal_wan: Path) -> None:
    names = ("fewer_steps", "tiny_vae")
    check_refusals(causal_wan, 1, scheduling="deadline", degradations=names)
