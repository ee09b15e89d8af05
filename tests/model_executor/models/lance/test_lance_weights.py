# SPDX-License-Identifier: Apache-2.0
"""Weight names and shapes match the tables and the released totals. Strict loading rejects all
other tensors.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.golden import golden_folder
from lance_driver import load_lance, request_of, run
from safetensors.torch import load_file, save_file

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.models.lance.config import LanceConfig, VisionConfig
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.weights import network_shapes, vae_shapes, vision_shapes
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_RULES
from vllm_omni.testing.tiny.lance import make_tiny
from vllm_omni.testing.tiny.wan import WAN_2_2_VAE_NAMES

GOLDEN = golden_folder("lance")
SMALL = {"max_image_pixels": 64 * 96}


def elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


@pytest.mark.parametrize(
    ("frames", "tensors", "total"),
    [(1, 1021, 6_185_205_808), (31, 1021, 7_105_548_336 - 668_684_288)],
)
def test_the_released_decoder_matches_the_table(frames: int, tensors: int, total: int) -> None:
    """The decoder, built on the meta device with the stored position table, has exactly the
    released tensors.
    """
    config = LanceConfig(max_latent_frames=frames)
    with torch.device("meta"):
        slots = checkpoint_slots(LanceNetwork(config, stored_positions=True))
    expected = network_shapes(config)
    assert {name: slot.shape for name, slot in slots.items()} == expected
    assert (len(expected), elements(expected)) == (tensors, total)


def test_the_released_vision_tower_and_autoencoder_match_their_tables() -> None:
    vision, vae = dict(vision_shapes(VisionConfig())), dict(vae_shapes(WAN_2_2_VAE))
    assert (len(vision), elements(vision)) == (390, 668_684_288)
    assert (len(vae), elements(vae)) == (196, 704_688_668)
    assert 1021 + len(vision) == 1411
    real = json.loads((GOLDEN / "report_vae_vit.json").read_text())["real_keys"]
    assert {rename(name, VAE_RULES): tuple(shape) for name, shape in real.items()} == vae
    assert {rename(name, WAN_2_2_VAE_NAMES): shape for name, shape in vae.items()} == {
        n: tuple(shape) for n, shape in real.items()
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shards_of_all_ranks_cover_the_whole(ranks: int) -> None:
    """All ranks' shards together contain all weights: heads and columns are split, and if there are
    more ranks than key/value heads, these heads are replicated.
    """
    config = LanceConfig(num_layers=1)
    with torch.device("meta"):
        whole = checkpoint_slots(LanceNetwork(config))
        parts = [
            checkpoint_slots(LanceNetwork(config, ParallelContext(rank=r, size=ranks)))
            for r in range(ranks)
        ]
    for name, slot in whole.items():
        covered = [0] * (
            slot.shape[0]
            if slot.target.dim() == 1 or parts[0][name].part != (1, 0)
            else slot.shape[1]
        )
        for part in (slots[name] for slots in parts):
            assert part.shape == slot.shape
            dim, start = part.part or (0, 0)
            for index in range(start, start + part.target.shape[dim]):
                covered[index] += 1
        assert min(covered) >= 1, name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_tiny(tmp_path, 0, "image")
    return tmp_path


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("llm2vae.bias"), "missing: 1 .llm2vae.bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected: 1 .extra"),
        (lambda t: t.update({"vae2llm.bias": torch.zeros(3)}), "misshapen: 1 .vae2llm.bias"),
        (lambda t: t["language_model.lm_head.weight"].fill_(torch.nan), "NaN or Inf"),
    ],
)
def test_a_damaged_decoder_is_refused(
    checkpoint: Path, change: Callable[..., None], message: str
) -> None:
    rewrite(checkpoint / "Lance_3B" / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        load_lance(checkpoint, **SMALL)


def test_bundled_and_separate_vision_towers_give_the_same_text(tmp_path: Path) -> None:
    for layout in ("video", "repository"):
        make_tiny(tmp_path / layout, 0, layout)
    bundled = load_lance(tmp_path / "video", **SMALL)
    separate = load_lance(tmp_path / "repository" / "Lance_3B_Video", **SMALL)
    tokens = [
        run(lance, request_of("x2t_image"))[1]["token_ids"].tolist()
        for lance in (bundled, separate)
    ]
    assert tokens[0] == tokens[1]
