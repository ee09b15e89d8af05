# SPDX-License-Identifier: Apache-2.0
"""Tests of chunks decoded by the tiny decoder (the `tiny_vae` entry of `omni.degradations`):
frames, session memory, and supported models.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import HEIGHT, WIDTH, load_model, make_request, open_session, stream
from helpers.chunks import (
    Result,
    assert_same,
    finish,
    run_steps,
    run_vae_stage,
    session_bits,
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
    """Run a chunk up to, but not including, the decode."""
    tensors = params.pop("tensors", None)
    request = make_request(session, tensors, **{"prompt": "a beach", **params})
    request.degradations = ("tiny_vae",) if degraded else ()
    run_steps(model, request)
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
def test_degraded_frames_are_decoded_by_the_tiny_decoder(
    causal_wan: Path, options: dict[str, Any], tiny: set[int]
) -> None:
    """Degrading a chunk changes only its decoded frames: latents, frame counts and frame numbers
    are the same as without degradation.
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


def test_a_stream_without_degraded_chunks_is_unchanged(causal_wan: Path, model: CausalWan) -> None:
    """If no chunk is degraded, enabling the degradation leaves the frames bit-identical, although
    it reserves memory for 8 more latent frames per stream.
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
    """A session's size in bytes is constant, and abandoned chunks and forks leave no trace,
    whichever decoder each chunk uses.
    """
    session = open_session(model)
    admitted = session.nbytes
    for index in range(CHUNKS):
        before = session_bits(session)
        for degraded in (True, False):
            model.post_decode(start(model, session, degraded, prompt="a volcano"))
        assert_same(session, before)
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


def test_a_stream_of_latents_is_not_degraded(model: CausalWan) -> None:
    """A stream that outputs latents skips decoding anyway, so its results report no degradation."""
    session = open_session(model, output="latents")
    request = start(model, session, True, output="latents")
    finish(model, request)
    assert request.degradations == ()


def test_a_vae_stage_switches_decoders_too(causal_wan: Path, model: CausalWan) -> None:
    """With `omni.vae_stage`, the rank with the transformer layers has neither decoder and reserves
    no memory for either.
    """
    serving = {**LADDER, "vae_stage": True}
    layers = load_model(causal_wan, ParallelContext(vae_stage=True), serving=serving)
    vae = load_model(causal_wan, ParallelContext(stage=1, vae_stage=True), serving=serving)
    assert layers.decoder is None and layers.tiny_vae is None and vae.tiny_vae is not None
    expected, whole = run(model, {1, 2}, 4)
    ours, theirs = open_session(layers), open_session(vae)
    assert ours.nbytes + theirs.nbytes == whole.nbytes
    for index in range(4):
        requests = [make_request(session, prompt="a beach") for session in (ours, theirs)]
        for request in requests:
            request.degradations = ("tiny_vae",) if index in {1, 2} else ()
        _, frames = run_vae_stage(layers, vae, *requests)
        assert torch.equal(frames["frames"], expected[index][1]["frames"])


def test_missing_weights_of_the_tiny_decoder_are_refused_at_start(
    causal_wan: Path,
) -> None:
    """If the tiny decoder's weights are missing, every rank refuses to start, including ranks that
    do not decode.
    """
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
