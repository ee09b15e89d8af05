# SPDX-License-Identifier: Apache-2.0
"""The tiny world's training batches contain every type of session, with the data that a served
session of that type has.
"""

from dataclasses import replace

import pytest
import torch

from training.tiny_world.transformer import Sizes
from training.tiny_world.world_data import (
    Mix,
    Prompts,
    Sampler,
    Shard,
    embed_prompts,
    few_step_sigmas,
    find_shards,
    noised,
    synthetic_prompts,
    synthetic_shard,
)
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions

SIZES = Sizes(dim=48, layers=2, heads=2, ffn=64, freq_dim=16, text_dim=8, text_len=6, grid=(4, 6))
FRAMES = 9
CHUNKS = torch.tensor([3, 3, 1, 1])


@pytest.fixture
def fields() -> dict[str, torch.Tensor]:
    """Return a shard in which each latent's value is 100 times its clip's index plus its frame's
    index.
    """
    made = synthetic_shard(6, FRAMES, SIZES)
    clip, frame = torch.arange(6).view(-1, 1, 1, 1, 1), torch.arange(FRAMES).view(1, -1, 1, 1, 1)
    made["latents"] = (100 * clip + frame).expand_as(made["latents"]).half()
    made["condition"] = (100 * clip + frame[:, :6] + 50).expand_as(made["condition"]).half()
    made["style"] = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.uint8)
    made["twin"] = torch.tensor([2, -1, 0, -1, -1, -1])
    return made


@pytest.fixture
def sampler(fields: dict[str, torch.Tensor], tmp_path) -> Sampler:
    torch.manual_seed(3)
    device = torch.device("cpu")
    saved = synthetic_prompts(SIZES)
    for number, style in enumerate(saved["styles"]):
        saved["embeddings"][style] = torch.full_like(saved["embeddings"][style], float(number))
    torch.save(saved, tmp_path / "prompts.pt")
    prompts = Prompts.load(tmp_path / "prompts.pt", device)
    mix = Mix(few_step_sigmas(), far_frames=1000, other_sink=0.0)
    return Sampler(Shard(fields, device, SIZES), prompts, SIZES, mix, CHUNKS)


NEVER, ALWAYS = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)


def _first(latents: torch.Tensor) -> torch.Tensor:
    """Return the encoded clip and frame of each latent. Shape: [B, F]."""
    return latents[:, :, 0, 0, 0]


def test_a_clip_without_variations_is_unchanged(sampler: Sampler) -> None:
    batch = sampler.batch(torch.tensor([0, 1, 4, 5]), NEVER, NEVER)
    assert _first(batch.latents).tolist() == [
        [100 * clip + f for f in range(FRAMES)] for clip in (0, 1, 4, 5)
    ]
    rows = batch.clips.condition[:, :, :, 0, 0]
    assert rows[:, 0, :4].eq(1).all() and not rows[:, 1:, :4].any()
    assert rows[1, :, 4].tolist() == [150, 151, 152, 153, 154, 155, 155, 155, 155]
    assert not batch.clips.switched.any()
    assert batch.clips.positions.tolist() == [list(range(FRAMES))] * 4
    assert batch.weights[0].tolist() == [1, 1, 1, 1.5, 1.5, 1.5, 1, 1, 1]
    assert batch.clips.text[:, 0].amax((1, 2)).tolist() == [0, 0, 2, 2]


def test_a_prompt_changes_between_chunks_to_the_twins_style(sampler: Sampler) -> None:
    """Between two chunks, the prompt changes to the style of the clip's twin.

    The prompts of clips without a twin do not change. The walk, the start image and the first chunk
    are still those of the original clip.
    """
    starts = set()
    for _ in range(40):
        batch = sampler.batch(torch.tensor([0, 1, 0, 3]), ALWAYS, NEVER)
        switched = batch.clips.switched
        assert not switched[1].any() and not switched[3].any()
        for row in (0, 2):
            start = int(switched[row].int().argmax())
            starts.add((row, start))
            assert switched[row].tolist() == [frame >= start for frame in range(FRAMES)]
            reported = [frame + (200 if frame >= start else 0) for frame in range(FRAMES)]
            assert _first(batch.latents)[row].tolist() == reported
            assert batch.clips.condition[row, 3, 4, 0, 0] == 53
            assert batch.clips.text[row, :, 0, 0].tolist() == [0, 1]
            assert torch.equal(batch.clips.motion[row], sampler.shard.motion[0])
    assert {start for row, start in starts if row == 0} == {3, 6}
    assert {start for row, start in starts if row == 2} == {3, 4, 5, 6, 7, 8}


def test_far_from_the_start_only_the_sinks_are_of_another_time(sampler: Sampler) -> None:
    """Far from a session's start, only the sink frames come from a different time.

    The sink frames are frames 0 to 2 of a walk in the same style. The positions of all other frames
    are shifted by the same offset. Frames without useful context do not contribute to the loss.
    """
    shifts = []
    for _ in range(20):
        batch = sampler.batch(torch.tensor([4, 4, 5, 5]), NEVER, ALWAYS)
        reported = _first(batch.latents)
        assert reported[:, 3:].tolist() == [
            [100 * clip + f for f in range(3, FRAMES)] for clip in (4, 4, 5, 5)
        ]
        assert set((reported[:, 0] // 100).tolist()) <= {4, 5}
        assert torch.equal(reported[:, :3], reported[:, :1] + torch.arange(3))
        assert batch.clips.positions[:, :3].tolist() == [[0, 1, 2]] * 4
        shift = batch.clips.positions[:, 3:] - torch.arange(3, FRAMES)
        assert torch.equal(shift, shift[:, :1].expand_as(shift)) and int(shift.min()) >= 0
        shifts += shift[:, 0].tolist()
        assert torch.equal(
            batch.clips.condition[:, 3:, 4, 0, 0], (reported[:, :1] + 55).expand(-1, FRAMES - 3)
        )
        assert batch.weights.tolist() == [[1, 1, 1, 0, 0, 0, 1, 1, 1]] * 4
    assert max(shifts) > 500 and len(set(shifts)) > 20


def test_noise_has_the_packages_convention() -> None:
    """The sigmas follow the package's v1 and v2 schedules, and a sigma of 1 is pure noise."""
    assert few_step_sigmas() == pytest.approx(
        LingBotOptions.parse({}, "v2").denoise_schedule().sigmas_x0, abs=1e-12
    )
    assert few_step_sigmas(10.0, (0, 179, 358, 679)) == pytest.approx(
        LingBotOptions.parse({}, "v1").denoise_schedule().sigmas_noise, abs=1e-12
    )
    latents, noise = torch.full((1, 2, 1, 1, 1), 3.0), torch.full((1, 2, 1, 1, 1), 5.0)
    assert noised(latents, torch.tensor([[1.0, 0.25]]), noise).flatten().tolist() == [5.0, 3.5]


def test_every_shard_belongs_to_one_rank(tmp_path, fields) -> None:
    for number in range(3):
        torch.save(fields, tmp_path / f"clips-{number}.pt")
    torch.save(fields, tmp_path / "clips-held.pt")
    names = [[path.name for path in find_shards(tmp_path, rank, 2)] for rank in range(2)]
    assert names == [["clips-0.pt", "clips-2.pt"], ["clips-1.pt"]]
    both = Shard.load(find_shards(tmp_path, 0, 2), torch.device("cpu"), SIZES)
    assert len(both) == 12 and both.twin.tolist() == [2, -1, 0, -1, -1, -1, 8, -1, 6, -1, -1, -1]
    with pytest.raises(ValueError, match=r"no clips-N\.pt for rank 3 of 4"):
        find_shards(tmp_path, 3, 4)


def test_a_shard_of_another_size_is_refused(fields) -> None:
    with pytest.raises(ValueError, match="latents of a shard must be"):
        Shard(fields, torch.device("cpu"), replace(SIZES, grid=(6, 6)))
    with pytest.raises(ValueError, match="focal"):
        Shard(fields | {"focal": torch.full((6,), 77.0)}, torch.device("cpu"), SIZES)


def test_prompts_are_embedded_as_the_served_world_does() -> None:
    """A shipped world's tiny umt5 embeds the prompts, and the embeddings are padded with zeros.

    A prompt that would have to be truncated raises an error.
    """
    sizes = Sizes()
    texts = {
        "day": ["A village by day.", "Snow"],
        "snow": ["A village in winter, snow on the roofs."],
    }
    saved = embed_prompts(texts, sizes)
    assert saved["styles"] == ["day", "snow"] and saved["prompts"] == texts
    rows = saved["embeddings"]["day"]
    lengths = (rows != 0).any(-1).sum(-1)
    assert rows.shape == (2, 64, 32) and 1 < lengths[1] < lengths[0] < 30
    assert not rows[0, int(lengths[0]) :].any()
    again = embed_prompts(texts, sizes)["embeddings"]["day"]
    assert torch.equal(rows, again), "the tokenizer and the encoder are the same each time"
    with pytest.raises(ValueError, match="would be cut"):
        embed_prompts({"day": ["unusual wording " * 30]}, sizes)
