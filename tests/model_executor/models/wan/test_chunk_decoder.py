# SPDX-License-Identifier: Apache-2.0
"""Tests of two decoders for one stream: frame counts, the start of each decoder, and restarts.

LingBot World's tests check the decoder that restarts at every chunk (`continuation`).
"""

import functools
from collections.abc import Collection

import pytest
import torch
from helpers.golden import golden_folder
from torch._dynamo.utils import counters

from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder, DecoderState
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.testing.tiny.wan import write_tiny_vae

GOLDEN = golden_folder("lingbot")
HEIGHT, WIDTH = 16, 24
CHUNK = 3
TOLERANCE = 1e-5
"""Tolerance for fp32 pixels in [-1, 1]. Results are not bit-identical, because a convolution over a
different number of frames may sum in a different order.
"""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> ChunkDecoder:
    wan = StreamingWanVAE(VAEConfig(base_dim=4), encoder=False)
    load_vae(wan, GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    path = tmp_path_factory.mktemp("tiny_vae") / "taew2_1.pth"
    write_tiny_vae(path, 0)
    tiny = TinyVAEDecoder(tiny_vae_channels(path))
    load_tiny_vae(tiny, path)
    return ChunkDecoder(wan, tiny)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    """Return twelve chunks of latents that change slowly, as in a video. They are a random walk
    with unit variance.
    """
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(1, 16, 12 * CHUNK, HEIGHT // 8, WIDTH // 8, generator=generator)
    walk = [steps[:, :, 0]]
    for frame in range(1, steps.shape[2]):
        walk.append(0.95 * walk[-1] + (1 - 0.95**2) ** 0.5 * steps[:, :, frame])
    return torch.stack(walk, dim=2)


def run(
    decoder: ChunkDecoder, parts: Collection[torch.Tensor], tiny: Collection[int]
) -> tuple[list[torch.Tensor], list[DecoderState]]:
    """Return each part's pixels and the state after the part. The tiny decoder decodes the parts
    whose indices are in `tiny`.
    """
    state, pixels, states = None, [], []
    for index, part in enumerate(parts):
        frames, state = decoder.decode(part, state, tiny=index in tiny)
        pixels.append(frames)
        states.append(state)
    return pixels, states


@pytest.mark.parametrize("tiny", [(), (0,), (1, 2), (3,), range(4)])
@pytest.mark.parametrize("cut", [[3, 3, 3, 3], [1, 1, 1, 1], [1, 3, 3, 3]])
def test_frame_counts_do_not_depend_on_the_decoder(
    decoder: ChunkDecoder, latents: torch.Tensor, cut: list[int], tiny: Collection[int]
) -> None:
    """For F latent frames, either decoder returns 4 F - 3 video frames at the start of a stream,
    and 4 F video frames at any later point. The state's size never exceeds its estimate.
    """
    pixels, states = run(decoder, latents[:, :, : sum(cut)].split(cut, dim=2), tiny)
    assert [part.shape[2] for part in pixels] == [4 * cut[0] - 3, *(4 * count for count in cut[1:])]
    assert all(part.shape[3:] == (HEIGHT, WIDTH) and part.abs().max() <= 1 for part in pixels)
    assert max(state.nbytes for state in states) <= decoder.state_nbytes(HEIGHT, WIDTH)
    assert [state.tiny for state in states] == [index in tiny for index in range(len(cut))]


@pytest.fixture(scope="module")
def always_tiny(decoder: ChunkDecoder, latents: torch.Tensor) -> dict[int, list[torch.Tensor]]:
    """Return the pixels of chunks with 3 latent frames and with 1 latent frame. The tiny decoder
    decodes all of these chunks.
    """
    assert decoder.tiny is not None
    return {
        chunk: run(ChunkDecoder(decoder.tiny), latents.split(chunk, dim=2), ())[0]
        for chunk in (3, 1)
    }


@pytest.mark.parametrize("tiny", [(0,), (2,), (3, 4), (2, 5)])
@pytest.mark.parametrize("chunk", [3, 1])
def test_a_degraded_chunk_equals_the_tiny_decoder_on_the_whole_stream(
    decoder: ChunkDecoder,
    latents: torch.Tensor,
    always_tiny: dict[int, list[torch.Tensor]],
    chunk: int,
    tiny: Collection[int],
) -> None:
    """A degraded chunk has the same frames as if the tiny decoder had decoded the whole stream,
    because the tiny decoder receives all latents that the chunk depends on.
    """
    found, _ = run(decoder, latents.split(chunk, dim=2)[: max(tiny) + 1], tiny)
    for index in tiny:
        torch.testing.assert_close(found[index], always_tiny[chunk][index], atol=TOLERANCE, rtol=0)


def test_the_exact_decoder_restarts_after_a_degraded_chunk(
    decoder: ChunkDecoder, latents: torch.Tensor
) -> None:
    """Frames before a degraded chunk are bit-identical to the exact decoder's frames. After a
    degraded chunk, the exact decoder restarts two latent frames early, drops their video frames,
    and continues the stream.
    """
    found, _ = run(decoder, latents.split(CHUNK, dim=2), (3, 4))
    whole, _ = decoder.main.decode(latents, None)
    assert torch.equal(torch.cat(found[:3], dim=2), whole[:, :, : 4 * 3 * CHUNK - 3])
    start = 5 * CHUNK
    restarted, _ = decoder.main.decode(latents[:, :, start - 2 :], None)
    assert torch.equal(torch.cat(found[5:], dim=2), restarted[:, :, 5:])


def test_a_state_is_immutable(decoder: ChunkDecoder, latents: torch.Tensor) -> None:
    """An aborted chunk does not change either decoder's state."""
    parts = latents.split(CHUNK, dim=2)
    for tiny in ((), (1,)):
        _, states = run(decoder, parts[:2], tiny)
        before = {name: tensor.clone() for name, tensor in states[-1].tensors().items()}
        for to_tiny in (True, False):
            first, _ = decoder.decode(parts[2], states[-1], tiny=to_tiny)
            again, _ = decoder.decode(parts[2], states[-1], tiny=to_tiny)
            assert torch.equal(first, again)
        after = states[-1].tensors()
        assert before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in after
        )


@pytest.mark.parametrize(
    ("largest", "streams"),
    [(960, {960: 4, 480: 8}), (2100, {2100: 1, 960: 2}), (6240, {6240: 1, 960: 4, 1560: 2})],
)
def test_batched_decodes_stay_within_the_warm_up(
    decoder: ChunkDecoder, latents: torch.Tensor, largest: int, streams: dict[int, int]
) -> None:
    """Batched decodes do not exceed the size that the warm-up ran. `streams` maps each latent size
    to the number of streams that can be decoded together.
    """
    alone = ChunkDecoder(decoder.main, largest_cells=largest)
    _, states = run(alone, latents[:, :, :3].split(CHUNK, dim=2), ())
    assert {
        cells: alone.most_streams(states[-1], torch.empty(16, 3, 1, cells)) for cells in streams
    } == streams


@pytest.mark.nightly
def test_nothing_is_compiled_after_two_chunks(
    decoder: ChunkDecoder, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switching to the tiny decoder and back introduces no new shapes, so no stream waits for the
    compiler.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = StreamingWanVAE(VAEConfig(base_dim=4), encoder=False, compiled=True)
    compiled.load_state_dict(decoder.main.state_dict())
    both, state, graphs = ChunkDecoder(compiled, decoder.tiny), None, []
    parts = latents.split(CHUNK, dim=2)[:7]
    torch._dynamo.reset()
    for part, tiny in zip(parts, (False, False, True, True, False, True, False), strict=True):
        _, state = both.decode(part, state, tiny=tiny)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[1]
