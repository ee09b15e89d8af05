# SPDX-License-Identifier: Apache-2.0
"""A LingBot world whose frames the tiny decoder makes: the frames, what a session holds, what is
refused.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lingbot_world_driver import (
    HEIGHT,
    WIDTH,
    finish,
    load_world,
    make_request,
    open_session,
    run_chunk,
    step,
)

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions
from vllm_omni.model_executor.models.lingbot_world.family import FAMILY
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld, WorldSetup
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import to_uint8

SMALL: dict[str, Any] = {"window_frames": 7, "sink_frames": 2}


@pytest.fixture(scope="module")
def world(lingbot_world: Path) -> LingBotWorld:
    return load_world(lingbot_world, decoder="tiny", **SMALL)


@pytest.mark.parametrize("chunk", [3, 1])
def test_frames_are_the_sessions_latents_decoded_as_one_clip(
    lingbot_world: Path, chunk: int
) -> None:
    """By the weights in the checkpoint's directory; where chunks end does not show.

    The exact decoder is not loaded.
    """
    world = load_world(lingbot_world, decoder="tiny", latent_frames_per_chunk=chunk, **SMALL)
    assert world.vae.has_encoder and not world.vae.has_decoder
    frames, latents = open_session(world, "rgb"), open_session(world, "latents", output="latents")
    keys: list[list[str]] = [["w"]] * chunk
    made = [
        run_chunk(world, frames, prompt="a beach", seed=5, actions=keys)[1]["frames"]
        for _ in range(4)
    ]
    clip = [
        run_chunk(world, latents, prompt="a beach", seed=5, actions=keys, output="latents")[1][
            "latents"
        ]
        for _ in range(4)
    ]
    path = find_layout(lingbot_world).tiny_vae
    assert path is not None
    decoder = TinyVAEDecoder(tiny_vae_channels(path))
    load_tiny_vae(decoder, path)
    pixels, _ = decoder.decode(torch.cat(clip, dim=1)[None], None)
    # sums of another order
    assert (torch.cat(made).int() - to_uint8(pixels).int()).abs().max() <= 1


def test_latents_do_not_depend_on_the_decoder(lingbot_world: Path, world: LingBotWorld) -> None:
    exact = load_world(lingbot_world, **SMALL)
    ours, theirs = (open_session(each, output="latents") for each in (world, exact))
    for _ in range(2):
        pair = [
            run_chunk(each, s, prompt="a beach", seed=5, output="latents")
            for each, s in ((world, ours), (exact, theirs))
        ]
        assert torch.equal(pair[0][1]["latents"], pair[1][1]["latents"])


def test_sessions_that_take_turns_and_forks_do_not_disturb_each_other(world: LingBotWorld) -> None:
    """Bit for bit; a fork goes on from its parent's features."""
    alone = {}
    for seed in (1, 2):
        session = open_session(world, f"alone{seed}")
        alone[seed] = [
            run_chunk(world, session, prompt="a beach", seed=seed)[1]["frames"] for _ in range(4)
        ]
    turns = {seed: open_session(world, f"turn{seed}") for seed in (1, 2)}
    for index in range(3):
        for seed, session in turns.items():
            assert torch.equal(
                run_chunk(world, session, prompt="a beach", seed=seed)[1]["frames"],
                alone[seed][index],
            )
    fork = turns[1].fork("fork")
    run_chunk(world, turns[1], prompt="a beach", seed=9)
    assert torch.equal(run_chunk(world, fork, prompt="a beach", seed=1)[1]["frames"], alone[1][3])


def test_bytes_are_known_beforehand(world: LingBotWorld) -> None:
    """Of the tiny decoder's features, a fraction of the exact one's; an abandoned chunk leaves
    them as they were.
    """
    session = open_session(world)
    assert session.nbytes == world.session_nbytes(DiffusionParams(session_id="a", prompt="a beach"))
    run_chunk(world, session, prompt="a beach")
    assert world.decoder is not None
    held = {name: t.clone() for name, t in session.tensors().items() if name.startswith("decoder.")}
    assert sum(tensor.nbytes for tensor in held.values()) == world.decoder.state_nbytes(
        HEIGHT, WIDTH
    )
    request = make_request(world, session, prompt="a beach")
    world.prepare_encode(request)
    while request.step < request.num_steps:
        step(world, [request])
    world.post_decode(request)
    left = session.tensors()
    assert all(torch.equal(left[name], tensor) for name, tensor in held.items())
    finish(world, request)
    assert not all(torch.equal(session.tensors()[name], tensor) for name, tensor in held.items())


def test_a_vae_stage_decodes_with_it(lingbot_world: Path, world: LingBotWorld) -> None:
    """The stage with layers then holds no decoder, the VAE stage the tiny one only."""
    layers = load_world(lingbot_world, ParallelContext(vae_stage=True), decoder="tiny", **SMALL)
    vae = load_world(
        lingbot_world, ParallelContext(stage=1, vae_stage=True), decoder="tiny", **SMALL
    )
    assert layers.decoder is None and layers.tiny_vae is None and not vae.vae.has_decoder
    sessions = [open_session(each) for each in (world, layers, vae)]
    for _ in range(2):
        _, expected = run_chunk(world, sessions[0], prompt="a beach", seed=4)
        ours, theirs = (
            make_request(each, s, prompt="a beach", seed=4)
            for each, s in ((layers, sessions[1]), (vae, sessions[2]))
        )
        layers.prepare_encode(ours)
        vae.prepare_encode(theirs)
        while ours.step < ours.num_steps:
            step(layers, [ours])
        vae.unpack_decode_state(
            theirs, layers.latents(ours).clone(), layers.pack_decode_state(ours)
        )
        assert torch.equal(finish(vae, theirs)[1]["frames"], expected["frames"])
        layers.commit(ours)


def test_without_its_weights_a_server_does_not_start(lingbot_world: Path) -> None:
    """On every rank, also on one that would not decode; the line says what is missing."""
    layout = dataclasses.replace(find_layout(lingbot_world), tiny_vae=None)
    for parallel in (ParallelContext(), ParallelContext(vae_stage=True)):
        omni = OmniConfig(height=HEIGHT, width=WIDTH, model={"decoder": "tiny"})
        setup = WorldSetup.of_checkpoint(
            hf_config(lingbot_world)["lingbot_world"], layout, omni, torch.float32, parallel
        )
        with pytest.raises(
            ValueError, match=r"lacks taew2_1.pth, which omni.model.decoder 'tiny' needs"
        ):
            LingBotWorld(setup).load_checkpoint(layout)


def test_what_does_not_go_with_it_is_refused(lingbot_world: Path) -> None:
    with pytest.raises(ValueError, match="convention 'pr3701' restarts decoder 'wan'"):
        LingBotOptions.parse({"decoder": "tiny", "convention": "pr3701"})
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model={"decoder": "tiny"}, vae_parallel=True)
    with pytest.raises(ValueError, match="decoder 'tiny' is too small to gain"):
        FAMILY.check_refusals(hf_config(lingbot_world), omni, 1)
