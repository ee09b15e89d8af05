# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2's streaming VAE and its tiny decoder produce the same results as the original
implementations, and process streams as their Wan 2.1 counterparts do.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers.golden import golden_folder, shared_golden
from helpers.recordings import change_tensor
from safetensors.torch import load_file, save, save_file

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE, VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_RULES
from vllm_omni.model_executor.models.wan.checkpoint.layout import WanComponents
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder, DecoderState
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    CHANNELS,
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors, StoredTensor
from vllm_omni.testing.parity.wan22_vae import load_recorded, load_recorded_tiny, verify
from vllm_omni.testing.tiny.wan import (
    VAE_2_2,
    write_diffusers_vae,
    write_original_vae,
    write_tiny_vae,
)

GOLDEN = golden_folder("wan22_vae")
_WEIGHTS = "wan22_vae_tiny_weights_orig_names.safetensors"
_TINY_WEIGHTS = "taew22_tiny_weights.safetensors"
_MIB = 2**20


@pytest.fixture(scope="module")
def vae() -> StreamingWanVAE:
    return load_recorded(GOLDEN)


@pytest.fixture(scope="module")
def tiny() -> TinyVAEDecoder:
    return load_recorded_tiny(GOLDEN)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    """Return latents of shape [1, 6, 8, 2, 3]."""
    return load_file(GOLDEN / "wan22_vae_stream.safetensors")["z"]


class Components(WanComponents):
    """Components for a model family that uses Wan 2.2's autoencoder."""

    download_name = "components"
    vae_release = "2.2"


# -- recordings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
def test_every_recorded_stage_is_equal(complete: bool) -> None:
    """Every stage's output equals its recording. The test compares both the recordings in the
    repository and the complete set.
    """
    golden = shared_golden("wan22_vae") if complete else GOLDEN
    report = verify(golden)
    assert report.ok, report.to_text()
    assert {row.scenario for row in report.rows} == {
        "wan22_vae",
        "wan22_vae_stream",
        "taew22_stream",
    }
    results = {row.stage: row.tolerance for row in report.rows}
    assert results["encoder: latents"] == 1e-5
    assert results["decoder: frames of chunks"] == 5e-5
    assert results["tiny decoder: frames of chunks"] == 2e-5


@pytest.mark.parametrize(
    ("file", "tensor", "amount"),
    [
        ("wan22_vae_stream", "patchify_out", 1e-6),
        ("wan22_vae_stream", "latents", 1e-4),
        ("wan22_vae_stream", "enc.step1.down1.shortcut", 1e-3),
        ("wan22_vae_stream", "enc.cache_after1.14", 1e-3),
        ("wan22_vae_stream", "dec.step1.up0", 1e-3),
        ("wan22_vae_stream", "decoded.chunk0", 1e-4),
        ("taew22_stream", "frames.chunk0", 1e-4),
        ("taew22_stream", "memory_end.17", 1e-4),
    ],
)
def test_a_changed_recording_fails(file: str, tensor: str, amount: float, tmp_path: Path) -> None:
    for path in GOLDEN.glob("*.safetensors"):
        shutil.copyfile(path, tmp_path / path.name)
    change_tensor(tmp_path / f"{file}.safetensors", tensor, amount)
    assert {row.scenario for row in verify(tmp_path).rows if not row.ok} == {file}


def test_diffusers_layout_gives_the_same_network(
    tmp_path: Path, vae: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """A folder in the diffusers layout, with a config and with tensor names from the recordings'
    key map, loads the same network.
    """
    names = json.loads((GOLDEN / "wan22_vae.json").read_text())["key_map_orig_to_diffusers"]
    stored = load_file(GOLDEN / _WEIGHTS)
    assert {rename(name, VAE_RULES): name for name in stored} == {
        target: name for name, target in names.items()
    }
    folder = tmp_path / "vae"
    folder.mkdir()
    save_file(
        {names[name]: tensor for name, tensor in stored.items()},
        folder / "diffusion_pytorch_model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(vae.config.to_dict()))
    layout = Components.of_folder(tmp_path, tmp_path)
    assert layout.vae == folder and layout.vae_config() == vae.config
    other = StreamingWanVAE(layout.vae_config())
    load_vae(other, folder)
    assert torch.equal(other.decode(latents, None)[0], vae.decode(latents, None)[0])


# -- configuration ---------------------------------------------------------------------------------


def test_a_released_config_is_recognised() -> None:
    """A released config is recognised by its keys, because it has the same class name as Wan 2.1's
    config.
    """
    stored = {"_class_name": "AutoencoderKLWan", **WAN_2_2_VAE.to_dict()}
    assert VAEConfig.from_dict(stored) == WAN_2_2_VAE
    with torch.device("meta"):
        diffusers = AutoencoderKLWan.from_config(WAN_2_2_VAE.to_dict())
    assert VAEConfig.from_dict(dict(diffusers.config)) == WAN_2_2_VAE
    sizes = WAN_2_2_VAE.spatial_factor, WAN_2_2_VAE.temporal_factor, WAN_2_2_VAE.frame_channels
    assert sizes == (16, 4, 12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"in_channels": 3}, "'in_channels' must be 12 with patch_size 2, got 3"),
        ({"patch_size": None}, "'in_channels' must be 3 with patch_size None, got 12"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial is 8, its levels give 16"),
        ({"z_dim": 16}, "need z_dim = 16 values, got 48"),
    ],
)
def test_contradictory_configs_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VAEConfig.from_dict({**WAN_2_2_VAE.to_dict(), **changed})


@pytest.mark.parametrize("release", ["original", "diffusers"])
def test_a_checkpoint_is_found_by_its_files(release: str, tmp_path: Path) -> None:
    """The checkpoint is found even if a shared assets folder also contains Wan 2.1's files."""
    (write_original_vae if release == "original" else write_diffusers_vae)(tmp_path, 0, VAE_2_2)
    write_tiny_vae(tmp_path / "taew2_2.pth", 0, vae=VAE_2_2)
    write_original_vae(tmp_path, 0)
    write_tiny_vae(tmp_path / "taew2_1.pth", 0)
    layout = Components.of_folder(tmp_path, tmp_path)
    assert layout.vae is not None and layout.tiny_vae == tmp_path / "taew2_2.pth"
    assert layout.checked_vae(48) == VAE_2_2
    vae = StreamingWanVAE(layout.vae_config())
    load_vae(vae, layout.vae)
    tiny = TinyVAEDecoder(tiny_vae_channels(layout.tiny_vae), vae.config)
    load_tiny_vae(tiny, layout.tiny_vae)
    latents = torch.randn(1, 48, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    assert tiny.decode(latents, None)[0].shape == vae.decode(latents, None)[0].shape
    with pytest.raises(ValueError, match="48 latent channels, the transformer 16"):
        layout.checked_vae(16)


def test_the_weights_of_the_other_release_are_refused(tmp_path: Path) -> None:
    write_original_vae(tmp_path, 0)
    with pytest.raises(ValueError, match="does not fit this model"):
        load_vae(StreamingWanVAE(VAE_2_2), tmp_path / "Wan2.1_VAE.pth")
    write_tiny_vae(tmp_path / "taew2_1.pth", 0)
    with pytest.raises(ValueError, match="misshapen"):
        load_tiny_vae(TinyVAEDecoder((8, 8, 4, 4), VAE_2_2), tmp_path / "taew2_1.pth")


def test_a_released_tiny_decoder_may_expand_one_frame_into_several(
    tmp_path: Path, tiny: TinyVAEDecoder, latents: torch.Tensor
) -> None:
    """If a layer in a released tiny decoder expands one frame into several, only the layer's last
    channels are loaded.
    """
    stored = load_file(GOLDEN / _TINY_WEIGHTS)
    weight = stored["decoder.7.conv.weight"]
    stored["decoder.7.conv.weight"] = torch.cat((torch.ones_like(weight), weight))
    save_file(stored, tmp_path / "taew2_2.safetensors")
    wider = TinyVAEDecoder(tiny.channels, tiny.config)
    load_tiny_vae(wider, tmp_path / "taew2_2.safetensors")
    assert torch.equal(wider.decode(latents, None)[0], tiny.decode(latents, None)[0])


def test_released_sizes() -> None:
    """The VAE and the tiny decoder have the released numbers of parameters. At 704x1280 in bf16,
    they also have the expected cache sizes per stream.
    """
    with torch.device("meta"):
        vae = StreamingWanVAE(WAN_2_2_VAE, dtype=torch.bfloat16)
        tiny = TinyVAEDecoder(CHANNELS, WAN_2_2_VAE, dtype=torch.float16)
    assert len(vae.state_dict()) == 196
    assert sum(parameter.numel() for parameter in vae.parameters()) == 704_688_668
    assert sum(parameter.numel() for parameter in vae.decoder.parameters()) == 555_049_228
    assert sum(parameter.numel() for parameter in tiny.parameters()) == 9_923_532
    assert round(vae.decoder_cache_nbytes(704, 1280) / _MIB) == 3067
    assert round(vae.encoder_cache_nbytes(704, 1280) / _MIB) == 1011
    assert round(tiny.decoder_cache_nbytes(704, 1280) / _MIB) == 36


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[3, 3, 2], [1] * 8, [2, 6], [8]])
def test_a_stream_equals_the_whole_clip_bit_for_bit(
    vae: StreamingWanVAE, latents: torch.Tensor, cuts: list[int]
) -> None:
    whole, whole_cache = vae.decode(latents, None)
    cache, parts = None, []
    for part in latents.split(cuts, dim=2):
        pixels, cache = vae.decode(part, cache)
        parts.append(pixels)
        assert cache.nbytes == vae.decoder_cache_nbytes(32, 48)
    assert torch.equal(torch.cat(parts, dim=2), whole) and whole_cache.equal(cache)


def test_the_first_latent_is_no_history_of_the_time_convolutions(
    vae: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """The first latent frame is not part of the time convolutions' history. After the second latent
    frame, the history of the stage with one frame per latent frame contains zeros and the frame
    decoded from the second latent frame.
    """
    _, first = vae.decode(latents[:, :, :1], None)
    _, second = vae.decode(latents[:, :, 1:2], first)
    histories = [index for index in (11, 18) if not first.features[index].any()]
    assert histories == [11, 18], "the two temporal upsamplers"
    assert not second.features[11][:, :, 0].any() and second.features[11][:, :, 1].any()


def test_small_parts_of_a_latent_give_the_same_frames(
    vae: StreamingWanVAE, latents: torch.Tensor
) -> None:
    small = StreamingWanVAE(vae.config, encoder=False, frames_per_call=2)
    load_vae(small, GOLDEN / _WEIGHTS)
    whole, whole_cache = vae.decode(latents, None)
    pixels, cache = small.decode(latents, None)
    torch.testing.assert_close(pixels, whole, atol=1e-5, rtol=0)
    for ours, expected in zip(cache.features, whole_cache.features, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("frames_per_call", [pytest.param(None, marks=pytest.mark.nightly), 2])
def test_later_latents_are_one_graph_for_each_part(
    monkeypatch: pytest.MonkeyPatch,
    vae: StreamingWanVAE,
    latents: torch.Tensor,
    frames_per_call: int | None,
) -> None:
    """For later latent frames, each part of the decoder is one compiled graph. With `fullgraph`,
    code that cannot be traced raises an error, and the decoder would then run uncompiled.
    """
    compile_for_real, graphs = torch.compile, []

    def traced(network: Any, **options: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return compile_for_real(network, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", traced)
    compiled = StreamingWanVAE(
        vae.config, encoder=False, compiled=True, frames_per_call=frames_per_call
    )
    load_vae(compiled, GOLDEN / _WEIGHTS)
    pixels, _ = compiled.decode(latents[:, :, :3], None)
    torch.testing.assert_close(pixels, vae.decode(latents[:, :, :3], None)[0], atol=1e-5, rtol=0)
    assert 0 < len(graphs) <= (2 if frames_per_call is None else 6)


def test_streams_are_decoded_one_by_one(vae: StreamingWanVAE, latents: torch.Tensor) -> None:
    """Streams are decoded one by one, so their frames do not depend on the other streams in a
    batch. A joint decode produces the same frames apart from rounding, and keeps the states of
    streams with different ages separate. It is tested with the tolerance of the recorded frames,
    because convolutions over two streams sum in a different order, which depends on the CPU.
    """
    decoder = ChunkDecoder(vae)
    other = latents.flip(2)
    starts = [decoder.decode(latents[:, :, :1], None)[1], decoder.decode(other[:, :, :4], None)[1]]
    parts = [latents[:, :, 1:3], other[:, :, 4:6]]
    assert [decoder.most_streams(start, parts[0][0]) for start in (None, *starts)] == [1, 1, 1]
    together = decoder.decode_together(parts, starts)
    for part, start, (pixels, state) in zip(parts, starts, together, strict=True):
        expected, after = decoder.decode(part, start)
        torch.testing.assert_close(pixels, expected, atol=5e-5, rtol=0)
        for name, tensor in after.tensors().items():
            torch.testing.assert_close(state.tensors()[name], tensor, atol=1e-4, rtol=1e-4)


def restored(
    decoder: ChunkDecoder, state: DecoderState, latents: int, file: Path, height: int = 32
) -> DecoderState:
    """Write the state to a file, and return the state read back from the file. Frames have the size
    `height` x 48.
    """
    file.write_bytes(save({name: each.contiguous() for name, each in state.tensors().items()}))
    with file.open("rb") as stored:
        length = int.from_bytes(stored.read(8), "little")
        table = msgspec.json.decode(stored.read(length), type=dict[str, StoredTensor])
        saved = SavedTensors(stored.fileno(), 8 + length, table, frozenset())
        state = decoder.state_layout(height, 48).restore(saved, "cpu", latents)
        saved.finish()
    return state


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("is_tiny", [False, True])
def test_a_restored_stream_continues_bit_for_bit(
    vae: StreamingWanVAE,
    tiny: TinyVAEDecoder,
    latents: torch.Tensor,
    chunks: int,
    is_tiny: bool,
    tmp_path: Path,
) -> None:
    """A restored stream continues with bit-identical frames, both after one latent frame and after
    two. After two, a time convolution's history is half empty.
    """
    decoder = ChunkDecoder(vae, tiny)
    state = None
    for index in range(chunks):
        _, state = decoder.decode(latents[:, :, index : index + 1], state, tiny=is_tiny)
    assert state is not None and state.nbytes <= decoder.state_nbytes(32, 48)
    file = tmp_path / "state.safetensors"
    again = restored(decoder, state, chunks, file)
    rest = latents[:, :, chunks : chunks + 3]
    expected, after = decoder.decode(rest, state, tiny=is_tiny)
    pixels, same = decoder.decode(rest, again, tiny=is_tiny)
    assert torch.equal(pixels, expected)
    assert all(
        torch.equal(tensor, same.tensors()[name]) for name, tensor in after.tensors().items()
    )
    with pytest.raises(RequestFailed, match=r"expected torch\.float32"):
        restored(decoder, state, chunks, file, height=64)


def test_a_stream_may_switch_to_the_tiny_decoder(
    vae: StreamingWanVAE, tiny: TinyVAEDecoder, latents: torch.Tensor
) -> None:
    """When a stream switches to the tiny decoder, that decoder restarts from the last latents. It
    returns the same frames as for a stream that used it from the start.
    """
    decoder = ChunkDecoder(vae, tiny, rounding="truncate")
    _, state = decoder.decode(latents[:, :, :7], None)
    assert decoder.can_be_tiny(state)
    pixels, _ = decoder.decode(latents[:, :, 7:], state, tiny=True)
    whole, _ = tiny.decode(latents, None)
    torch.testing.assert_close(pixels, whole[:, :, -4:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(16, 24), (24, 16), (40, 48)])
def test_sizes_that_are_no_multiple_of_sixteen_are_refused(
    vae: StreamingWanVAE, size: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        vae.encode(torch.zeros(1, 3, 1, *size), None)


def test_half_precision_keeps_the_frames(vae: StreamingWanVAE, latents: torch.Tensor) -> None:
    """Frames in bf16, the released precision, stay close to those in fp32."""
    half = StreamingWanVAE(vae.config, dtype=torch.bfloat16)
    load_vae(half, GOLDEN / _WEIGHTS)
    pixels, cache = half.decode(latents, None)
    expected, _ = vae.decode(latents, None)
    assert pixels.dtype == torch.bfloat16 and isinstance(cache, VAECache)
    assert (pixels.float() - expected).abs().mean() < 0.02


def test_a_decoder_of_another_width_is_built_from_shapes(tmp_path: Path) -> None:
    config = replace(VAE_2_2, decoder_base_dim=6)
    write_original_vae(tmp_path, 0, config)
    assert Components.of_folder(tmp_path, tmp_path).vae_config() == config
