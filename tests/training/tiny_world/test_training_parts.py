# SPDX-License-Identifier: Apache-2.0
"""Two steps of each training of the autoencoder's, one after the other, and a data set made with
its result.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from training.tiny_world import clips, train_tiny_decoder, train_vae
from training.tiny_world.autoencoder import load_autoencoder
from training.tiny_world.clips import Encoder, joined, make_clips
from training.tiny_world.render import FOCAL, Renderer
from vllm_omni.model_executor.models.wan.vae.tiny_vae import TinyVAEDecoder

SMALL = ["--minutes", "5", "--footage-seconds", "0", "--device", "cpu"]


def _run(main, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    main()


@pytest.fixture(autouse=True, scope="module")
def _shared_renderer(small_renderer: Renderer) -> Iterator[None]:
    """The trainings ask for a renderer of their own size; here all have the small one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (train_vae, train_tiny_decoder, clips):
            patch.setattr(module, "Renderer", lambda *_: small_renderer)
        yield


@pytest.fixture(scope="module")
def trained(_shared_renderer: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tests below go on from: nobody writes into it."""
    out = tmp_path_factory.mktemp("trained")
    arguments = ["--out", str(out), "--steps", "2", "--batch", "2", "--frames", "5", "--width", "4"]
    with pytest.MonkeyPatch.context() as patch:
        _run(train_vae.main, patch, *arguments, *SMALL)
    return out


def test_the_autoencoder_trains_and_continues(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps change the weights, are logged with PSNR on held-out clips, and a second piece
    goes on from there.
    """
    [line] = [json.loads(row) for row in (trained / "vae_curve.jsonl").read_text().splitlines()]
    assert line["step"] == 2 and 0 < line["psnr"] < 40 and line["sharpness"] > 0
    state = torch.load(trained / "vae_state.pt", weights_only=True)
    arguments = [
        "--out",
        str(tmp_path / "b"),
        "--steps",
        "1",
        "--batch",
        "2",
        "--frames",
        "5",
        "--width",
        "4",
    ]
    _run(train_vae.main, monkeypatch, *arguments, "--resume", str(trained), *SMALL)
    later = torch.load(tmp_path / "b" / "vae_state.pt", weights_only=True)
    assert later["step"] == 3
    name = "decoder.head.2.weight"
    assert not torch.equal(state["model"][name], later["model"][name])


def test_the_saved_autoencoder_has_latents_of_unit_size(
    trained: Path, small_renderer: Renderer
) -> None:
    """`vae.pt` is normalised on the held-out clips: means are 0, no channel varies by more than 1
    (the posterior's own deviation counts too).
    """
    footage = train_vae.Footage(small_renderer, 5, train_vae._HELD_OUT_SEED, seconds=0, at_once=3)
    latents, _ = load_autoencoder(trained / "vae.pt", "cpu").moments(
        train_vae.pixels(footage.clips[:, :5])
    )
    assert float(latents.mean((0, 1, 3, 4)).abs().max()) < 1e-2
    assert 0.01 < float(latents.var((0, 1, 3, 4)).max()) < 1.01


def test_the_cheap_decoder_trains(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a line of the curve, and a file whose names and shapes are those of the served
    decoder.
    """
    arguments = [
        "--vae",
        str(trained / "vae.pt"),
        "--out",
        str(tmp_path / "c"),
        "--steps",
        "2",
        "--batch",
        "2",
    ]
    _run(train_tiny_decoder.main, monkeypatch, *arguments, "--frames", "5", *SMALL)
    *_, line = [
        json.loads(row)
        for row in (tmp_path / "c" / "tiny_decoder_curve.jsonl").read_text().splitlines()
    ]
    assert line["step"] == 2 and 0 < line["psnr"] < 40
    made = torch.load(tmp_path / "c" / "tiny_decoder.pt", weights_only=True)
    served = TinyVAEDecoder(train_tiny_decoder.WIDTHS)
    assert {name: value.shape for name, value in made.items()} == {
        name: value.shape for name, value in served.state_dict().items()
    }


def test_clips_hold_what_the_transformers_trainer_reads(
    trained: Path, small_renderer: Renderer
) -> None:
    """Shapes and types of every field; a twin is the same walk in another style."""
    latents = 7  # a third of what is trained on: rendering takes the time
    encoder = Encoder(load_autoencoder(trained / "vae.pt", "cpu"))
    shards = [
        make_clips(2, seed, small_renderer, encoder, latents=latents, at_once=4, paired=0.5)
        for seed in (1, 2)
    ]
    shard = joined(shards)
    latent = (16, small_renderer.height // 8, small_renderer.width // 8)
    assert (
        shard["latents"].shape == (6, latents, *latent) and shard["latents"].dtype == torch.float16
    )
    assert shard["condition"].shape == (6, clips.CONDITION_LATENTS, *latent)
    assert (
        shard["relative"].shape == (6, latents, 3, 4) and shard["relative"].dtype == torch.float32
    )
    assert shard["keys"].shape == (6, latents) and shard["style"].dtype == torch.uint8
    assert set(shard["focal"].tolist()) == {FOCAL * small_renderer.width}
    assert shard["positions"].shape == shard["angles"].shape == (6, latents, 2)
    assert (
        bool(torch.isfinite(shard["latents"].float()).all())
        and float(shard["latents"].float().std()) > 0.1
    )
    twins = [(index, twin) for index, twin in enumerate(shard["twin"].tolist()) if twin >= 0]
    assert len(twins) == 4
    for index, twin in twins:
        assert int(shard["twin"][twin]) == index and int(shard["style"][twin]) != int(
            shard["style"][index]
        )
        assert torch.equal(shard["keys"][index], shard["keys"][twin])
        assert not torch.equal(shard["latents"][index], shard["latents"][twin])
    first = shard["latents"][:, 0].float()
    # both begin with the start picture
    assert float((shard["condition"][:, 0].float() - first).abs().max()) < 0.02
