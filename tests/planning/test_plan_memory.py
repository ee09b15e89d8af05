# SPDX-License-Identifier: Apache-2.0
"""Tests of `vllm-omni plan`: the memory of models and splits, the printed tables, and the
command.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.main import make_parser
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.vae.tiny_vae import CHANNELS, TinyVAEDecoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, cache_nbytes
from vllm_omni.planning.memory import GPU_BYTES, plan_memory, splits, weight_bytes, window_bytes
from vllm_omni.planning.models import known_names, model_of, size_names
from vllm_omni.planning.report import WEIGHT_ITEMSIZES
from vllm_omni.planning.stream_model import BF16, WAN_2_2_AUTOENCODER, ParallelSplit

H200 = GPU_BYTES["H200"]


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    args = make_parser().parse_args(["plan", *argv])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_models_have_the_parameters_of_their_checkpoints() -> None:
    expected = [18_544_332_864, 1_709_502_016, 1_418_996_800, 14_288_491_584, 1_619_242_304]
    expected += [5_283_110_592, 5_270_329_536, 1_282_007_192, 1_282_007_192, 2_303_055_808]
    assert [model_of(name).parameters for name in size_names()] == expected


def test_published_networks_are_planned_by_their_download_names() -> None:
    """A published network can be planned by its download name, with its own window, sinks and
    steps.

    An unknown name is rejected with an error that lists the known names.
    """
    settings = {
        name: (model.window, model.sinks, model.denoise)
        for name in known_names()
        if (model := model_of(name))
    }
    assert settings["longlive"] == settings["reward_forcing"] == (12, 3, 4) and settings[
        "causvid"
    ] == (21, 3, 3)
    assert settings["rolling_forcing"] == (21, 3, 5) and settings["krea_realtime_14b"] == (6, 0, 4)
    assert model_of("krea_realtime_14b").parameters == model_of("causal_wan_14b").parameters
    assert model_of("waypoint_1_1_small").parameters == model_of("waypoint_1_small").parameters
    with pytest.raises(
        ValueError, match=r"neither a checkpoint directory nor one of lingbot_world, .*longlive"
    ):
        model_of("nothing")


def test_a_world_with_a_camera_branch_is_planned() -> None:
    """The plan for a world with a camera branch includes the K/V window at 704x1280 in bf16 and the
    branch's parameters.
    """
    model = model_of("dreamx_world")
    assert model.tokens_per_frame == 880
    assert window_bytes(model, 12) == pytest.approx(3.63 * 2**30, rel=2e-3)
    linears = 30 * (8 * 3072**2 + 2 * 3072 * 14336)
    assert model.block_parameters - linears == 30 * 4 * 3072 * 768
    with pytest.raises(ValueError, match="dreamx_world takes no video"):
        model_of("dreamx_world", video_input=True)


def test_the_action_modules_of_a_game_are_counted() -> None:
    """The plan for a game includes the keys and values of its action modules: a session at 352x640
    in bf16 has the expected number of bytes.
    """
    model = model_of("matrix_game")
    blocks = replace(model, side_kv=0)
    assert window_bytes(blocks, 6) == pytest.approx(973e6, rel=1e-3)
    assert window_bytes(model, 6) - window_bytes(blocks, 6) == pytest.approx(324e6, rel=2e-3)
    with pytest.raises(ValueError, match="matrix_game takes no video"):
        model_of("matrix_game", video_input=True)


@pytest.mark.parametrize(("name", "gib"), [("lingbot_world", 3.57), ("causal_wan_14b", 0.0)])
def test_a_chunk_holds_the_camera_modulation_of_all_layers(name: str, gib: float) -> None:
    """A chunk's memory includes the scale and shift tensors that `camera_modulation` creates for
    each token and layer.

    For models without a camera, a chunk's memory excludes these tensors.
    """
    model = model_of(name)
    plain = plan_memory(replace(model, camera=False), H200, ParallelSplit())
    camera = plan_memory(model, H200, ParallelSplit())
    assert camera.session_bytes - plain.session_bytes == pytest.approx(gib * 2**30, rel=2e-3)


def test_cuda_graphs_hold_one_more_copy_of_the_inputs() -> None:
    """CUDA graphs take 4.25 GB on the measured GPU, regardless of the number of sessions: a chunk's
    modulation and the prompt's K/V.
    """
    graphs = model_of("lingbot_world", "realtime")
    plain = replace(graphs, cuda_graphs=False)
    for sessions in (1, 2):
        by_graphs, without = (
            plan_memory(model, H200, ParallelSplit(), sessions) for model in (graphs, plain)
        )
        extra = by_graphs.memory_bytes - without.memory_bytes
        assert extra == pytest.approx(4.25e9, rel=5e-3)
    two = ParallelSplit(2)
    assert plan_memory(graphs, H200, two) == plan_memory(plain, H200, two)


def test_the_autoencoder_of_wan_2_2_has_the_bytes_of_its_network() -> None:
    """The number of bytes planned for the Wan 2.2 autoencoder equals the actual network's size at
    480x832 in bf16.

    The size of the caches is proportional to the frame area.
    """
    memory, decoder = WAN_2_2_AUTOENCODER, WAN_2_2_AUTOENCODER.tiny
    assert decoder is not None
    caches = [
        cache_nbytes(WAN_2_2_VAE, part, 480, 832, torch.bfloat16) for part in ("decoder", "encoder")
    ]
    assert [memory.decoder_cache, memory.encoder_cache] == pytest.approx(caches, rel=1e-3)
    with torch.device("meta"):
        whole = StreamingWanVAE(WAN_2_2_VAE)
        encoder = StreamingWanVAE(WAN_2_2_VAE, decoder=False)
        tiny = TinyVAEDecoder(CHANNELS, WAN_2_2_VAE, dtype=torch.bfloat16)
    parameters = [
        sum(parameter.numel() for part in parts for parameter in part.parameters())
        for parts in ((whole,), (encoder, tiny))
    ]
    assert [memory.weights, decoder.weights] == pytest.approx(
        [BF16 * count for count in parameters], rel=5e-3
    )
    assert decoder.decoder_cache == pytest.approx(tiny.decoder_cache_nbytes(480, 832), rel=1e-3)
    model = replace(
        model_of("causal_wan_1_3b"), latent_cell=16, height=704, width=1280, autoencoder=memory
    )
    assert model.tokens_per_frame == 880
    assert model.area * memory.decoder_cache == pytest.approx(3067 * 2**20, rel=1e-3)


def test_a_vae_stage_takes_the_decoder_from_the_first_gpu() -> None:
    model = model_of("causal_wan_1_3b", window=9)
    one, with_stage = (
        plan_memory(model, H200, ParallelSplit()),
        plan_memory(model, H200, ParallelSplit(1, 2, vae_stage=True)),
    )
    assert one.memory_bytes - with_stage.memory_bytes == pytest.approx(4.0e9 + 1801 * 2**20)
    assert str(ParallelSplit(2, 3, vae_stage=True)) == "Ulysses 2 x PP 2 + VAE"


def test_ranks_that_decode_together_share_the_decoder() -> None:
    model = model_of("causal_wan_1_3b")
    alone, shared = (
        plan_memory(model, H200, ParallelSplit(4, vae_parallel=each)) for each in (False, True)
    )
    assert alone.session_bytes - shared.session_bytes == pytest.approx(0.75 * 1801 * 2**20)
    assert alone.memory_bytes - shared.memory_bytes == pytest.approx(0.75 * (1801 * 2**20 + 4.0e9))
    assert all(split.vae_parallel == (split.ranks > 1) for split in splits(model, 8))


def test_temporal_stages_need_a_noise_matched_cache_and_a_stage_per_step() -> None:
    model = model_of("causal_wan_14b", window=9, denoise=4, noise_matched=True, in_flight=4)
    assert ParallelSplit(1, 4, temporal=True) in splits(model, 4) and ParallelSplit(
        1, 2, temporal=True
    ) not in splits(model, 4)
    assert ParallelSplit(1, 5, vae_stage=True, temporal=True) in splits(model, 5), (
        "and one more for the VAE"
    )
    assert not any(split.temporal for split in splits(model_of("causal_wan_14b"), 4))
    by_layers, by_steps = (
        plan_memory(model, H200, ParallelSplit(1, 4, temporal=each)) for each in (False, True)
    )
    assert by_steps.memory_bytes > by_layers.memory_bytes, "each stage holds all layers"


def test_the_command_prints_splits_with_their_options_and_measured_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = plan(capsys, "lingbot_world", "--n", "4").splitlines()
    flags = (
        "--tensor-parallel-size 4 --additional-config.omni.model.sequence_parallel true "
        "--additional-config.omni.vae_parallel true"
    )
    assert any(
        line.startswith("Ulysses 4 ") and line.endswith(f"sessions  {flags}") for line in lines
    )
    measured = lines[
        next(number for number, line in enumerate(lines) if line.startswith("measured")) + 1 :
    ]
    assert any(
        line.startswith("Ulysses 4 ") and line.endswith("FP8 weights and K/V") for line in measured
    )
    assert measured[0].startswith("1 GPU "), "results are sorted by the number of GPUs"
    matched = plan(capsys, "causal_wan_14b", "--n", "4", "--window", "9", "--matched-steps", "4")
    assert "noise-matched, 4 steps, 4 chunks in flight" in matched and "temporal 4" in matched
    assert "--additional-config.omni.chunks_in_flight 4" in matched
    video = plan(
        capsys, "causal_wan_1_3b", "--window", "9", "--latent-frames", "1", "--video-input"
    )
    assert "4 frames per chunk" in video and "video to video" in video
    assert (
        "model.video_input true --additional-config.omni.model.latent_frames_per_chunk 1" in video
    )
    fp8 = plan(capsys, "lingbot_world", "--kv-cache-dtype", "fp8", "--quantization", "fp8")
    assert (
        "FP8 keys and values, FP8 weights" in fp8
        and "--kv-cache-dtype fp8 --quantization fp8" in fp8
    )
    assert fp8 == plan(
        capsys, "lingbot_world", "--kv-cache-dtype", "fp8_e4m3", "--quantization", "fp8"
    )
    assert "measured: no run of this model and size" in plan(
        capsys, "causal_wan_14b", "--height", "720"
    )


def test_a_preset_is_planned_with_its_options_and_its_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A preset is planned with its options and its measured speed, and flags override its options.

    A narrow network has FP8 weights only in the `small` preset.
    """
    text = plan(capsys, "lingbot_world", "--preset", "realtime")
    assert "window 15" in text and "preset realtime, FP8 keys and values, FP8 weights" in text
    assert "--additional-config.omni.model.preset realtime" in text
    assert "8.7 FPS on one H100; realtime: 24.4 FPS on one H200; small: not measured" in text
    assert "window 12" in plan(capsys, "lingbot_world", "--preset", "realtime", "--window", "12")
    narrow = model_of("lingbot_world_v2_1_3b", "realtime")
    assert (narrow.weight_itemsize, narrow.kv_itemsize, narrow.denoise) == (2, 1, 2)
    small = model_of("lingbot_world_v2_1_3b", "small")
    assert (small.weight_itemsize, small.text_on_cpu, small.denoise) == (1, True, 4)


def test_splits_can_be_served() -> None:
    """Every planned split can be served: the number of heads is divisible by the number of ranks,
    and the split fits the GPUs. No split is listed twice.
    """
    model = model_of("causal_wan_1_3b")
    found = splits(model, 8)
    assert len(set(found)) == len(found)
    assert all(split.gpus <= 8 and model.heads % split.ranks == 0 for split in found)
    assert {split.ranks for split in found} == {1, 2, 3, 4, 6}
    assert splits(model, 1) == [ParallelSplit()]


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4"])
def test_quantization_reduces_the_weights_of_the_blocks(quantization: str) -> None:
    """Quantization reduces the size of the weights in the blocks. With int8, it also reduces the
    size of the weights in the camera layers.

    LingBot has 18.5 billion weights, of which 14 billion are in the blocks' layers and 4 billion in
    camera layers.
    """
    plain = model_of("lingbot_world")
    assert 0.74 < plain.block_parameters / plain.parameters < 0.77
    assert 0.22 < plain.camera_parameters / plain.parameters < 0.24
    quantized = replace(plain, weight_itemsize=WEIGHT_ITEMSIZES[quantization])
    saved = weight_bytes(plain, ParallelSplit()) - weight_bytes(quantized, ParallelSplit())
    assert (
        saved
        == plain.block_parameters * (2 - WEIGHT_ITEMSIZES[quantization]) + plain.camera_parameters
    )
    halves = weight_bytes(plain, ParallelSplit(2, tensor=True)) - weight_bytes(
        quantized, ParallelSplit(2, tensor=True)
    )
    assert halves == saved / 2


def test_all_models_are_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A single table lists all models. More GPU memory never reduces the number of sessions.

    Keeping the text encoder on the host frees GPU memory.
    """
    lines = plan(capsys, "all").splitlines()
    assert lines[0].split()[5::2] == ["12", "16", "24", "32", "48", "80", "96", "141"]
    held = [[int(count) for count in line[70:].split()] for line in lines[1:]]
    assert len(held) == len(size_names()) * 3 * 2 and all(row == sorted(row) for row in held)
    for on_host, alongside in zip(held[::2], held[1::2], strict=True):
        assert all(a >= b for a, b in zip(on_host, alongside, strict=True))


def test_a_checkpoint_directory_can_be_planned(
    capsys: pytest.CaptureFixture[str], lingbot_world: Path
) -> None:
    assert "lingbot_world: 480x832" in plan(capsys, str(lingbot_world), "--n", "2")


def test_a_directory_takes_precedence_over_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_family("causal_wan").make_tiny(
        tmp_path / "longlive", 0, get_family("causal_wan").layouts[0]
    )
    released = model_of("longlive")
    monkeypatch.chdir(tmp_path)
    assert model_of("longlive").parameters < released.parameters / 1000


def test_an_unplannable_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    get_family("null_world").make_tiny(tmp_path, 0, get_family("null_world").layouts[0])
    known = (
        "`plan` knows lingbot_world, causal_wan, matrix_game, dreamx_world, abot_world and waypoint"
    )
    with pytest.raises(ValueError, match=f"is a null_world; {known}"):
        model_of(str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lingbot_world", "--gpu", "A100"], "must be one of H200, H100"),
        (["lingbot_world", "--n", "0"], "from 1 to 64"),
        (["lingbot_world", "--height", "100"], "multiples of 16"),
        (["waypoint", "--preset", "realtime"], "no preset 'realtime'; allowed: reference, small"),
        (["all", "--preset", "small"], "name one model with --preset"),
        (["no_such_model"], "neither a checkpoint directory nor one of"),
        (["lingbot_world", "--sessions", "60"], "fit no split"),
        (["lingbot_world", "--matched-steps", "4"], "no noise-matched cache"),
        (["causal_wan_1_3b", "--matched-steps", "0"], "from 1 to 64"),
        (["lingbot_world", "--video-input"], "takes no video"),
        (["causal_wan_1_3b", "--latent-frames", "0"], "from 1 to 32"),
        (["causal_wan_1_3b", "--chunks-in-flight", "2"], "needs --matched-steps"),
    ],
)
def test_invalid_plans_are_refused(argv: list[str], words: str) -> None:
    args = make_parser().parse_args(["plan", *argv])
    with pytest.raises(CommandError, match=words):
        args.run(args)


def test_fp8_kv_increases_the_number_of_sessions() -> None:
    """FP8 halves the size of LingBot's K/V window, which takes up 21.4 GiB in bf16, so more
    sessions fit. The rest of a session's memory does not change.
    """
    plain, fp8 = (
        plan_memory(model_of("lingbot_world", kv_itemsize=size), H200, ParallelSplit())
        for size in (2, 1)
    )
    assert plain.session_bytes - fp8.session_bytes == pytest.approx(28_080 * 400 * 1024)
    assert fp8.max_sessions > plain.max_sessions


def test_the_text_encoder_counts_for_one_gpu() -> None:
    """The text encoder's memory is counted on only one GPU.

    With two stages, the first stage holds the encoder and the last stage decodes, so the fullest
    GPU needs less memory than if a single GPU did both.
    """
    model = model_of("lingbot_world")
    hosted = replace(model, text_on_cpu=True)
    first, last = (
        weight_bytes(model, ParallelSplit(stages=2), first_stage=is_first)
        for is_first in (True, False)
    )
    assert first - last == model.context_weights > 11e9
    alongside, on_host = (
        plan_memory(one, H200, ParallelSplit(stages=2)) for one in (model, hosted)
    )
    assert (
        on_host.memory_bytes < alongside.memory_bytes < on_host.memory_bytes + model.context_weights
    )
    alone = plan_memory(model, H200, ParallelSplit())
    assert alone.memory_bytes - plan_memory(
        hosted, H200, ParallelSplit()
    ).memory_bytes == pytest.approx(model.context_weights)


def test_an_image_encoder_counts_for_every_gpu() -> None:
    game = model_of("matrix_game", text_on_cpu=False)
    first, last = (
        weight_bytes(game, ParallelSplit(stages=2), first_stage=is_first)
        for is_first in (True, False)
    )
    assert first == last
