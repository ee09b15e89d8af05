# SPDX-License-Identifier: Apache-2.0
"""The runner's weights: memory use, CPU offload, in-place reload and dummy weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step
from helpers.snapshot_steps import Worker, game_chunk, text_chunk, world_chunk
from helpers.wan22_driver import HEIGHT, WIDTH
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from vllm_omni.model_executor.checkpoint import tensor_files
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

SMALL = {"model": {"window_frames": 7, "sink_frames": 2}}
MakeRunner = Callable[..., Any]


@pytest.fixture(scope="module")
def other_world(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A `null_world` checkpoint with different weights."""
    return tiny_checkpoint("null_world", seed=1)


def bytes_of(runner: Any) -> int:
    return sum(
        parameter.numel() * parameter.element_size() for parameter in runner.network.parameters()
    )


def first_frames(runner: Any, session_id: str) -> torch.Tensor:
    return text_chunk(Worker(runner), session_id, 0)["frames"]


def test_memory_usage_counts_weights_and_adapters(
    make_runner: MakeRunner, causal_wan: Path
) -> None:
    """The memory usage that vLLM logs is the size of the weights plus the size of the adapters."""
    runner = make_runner(causal_wan, SMALL, enable_lora=True, max_loras=1, max_lora_rank=8)
    assert runner.adapters.nbytes > 0
    assert runner.model_memory_usage == bytes_of(runner) + runner.adapters.nbytes


@pytest.mark.usefixtures("no_offloader_left")
@pytest.mark.parametrize(
    "precision", [{}, {"dtype": "bfloat16", "quantization": "fp8_per_channel"}], ids=["fp32", "fp8"]
)
def test_offloaded_weights_change_no_frame(
    make_runner: MakeRunner, causal_wan: Path, precision: dict[str, str]
) -> None:
    """Frames are the same with and without offloaded weights, even after a reload, which replaces
    the parameters of quantized layers.

    The memory usage includes the weight slots on the device, not the weights on the host.
    """
    plain = make_runner(causal_wan, SMALL, **precision)
    expected = first_frames(plain, "a")
    runner = make_runner(causal_wan, SMALL, cpu_offload_gb=1, **precision)
    offloader = runner.offloader
    assert offloader.host_bytes > 0
    device_bytes = bytes_of(plain) + offloader.slot_bytes - offloader.host_bytes
    assert runner.model_memory_usage == device_bytes
    assert torch.equal(first_frames(runner, "a"), expected)
    with torch.inference_mode():  # `make_runner` creates the weights in this mode
        runner.reload_weights()
    assert torch.equal(first_frames(runner, "b"), expected)


@pytest.mark.usefixtures("no_offloader_left", "uncompiled")
def test_two_offloaded_experts_in_one_step(make_runner: MakeRunner, tmp_path: Path) -> None:
    """Two videos with different numbers of denoise steps use both of Wan 2.2's experts in one
    engine step. Offloading the weights does not change their latents.
    """
    get_family("wan2_2").make_tiny(tmp_path, 0, "t2v")
    omni = {"height": HEIGHT, "width": WIDTH, "model": {"max_num_frames": 9}}

    def videos(**engine_args: Any) -> list[torch.Tensor]:
        fields: dict[str, Any] = {"one_shot": True, "prompt": "a river", "output": "latents"}
        requests = (
            new_request(
                f"r{n}",
                session_id=f"s{n}",
                seed=n,
                num_frames=9,
                num_inference_steps=4 + n,
                **fields,
            )
            for n in range(2)
        )
        results = run_to_end(make_runner(tmp_path, omni, **engine_args), *requests)
        return [results[f"r{n}"][1]["latents"].clone() for n in range(2)]

    for plain, offloaded in zip(videos(), videos(cpu_offload_gb=0.00005), strict=True):
        assert torch.equal(offloaded, plain)


def test_weights_are_replaced_in_place(
    make_runner: MakeRunner, null_world: Path, other_world: Path
) -> None:
    """Weights can be replaced with weights of the same shapes from another checkpoint. Later
    reloads read the new checkpoint again.
    """
    runner, other = make_runner(null_world), make_runner(other_world)
    expected = first_frames(other, "a")
    assert not torch.equal(first_frames(runner, "a"), expected)
    with torch.inference_mode():
        runner.reload_weights(weights_path=str(other_world))
        assert torch.equal(first_frames(runner, "b"), expected)
        for parameter in runner.network.parameters():
            parameter.zero_()
        runner.reload_weights()
    assert torch.equal(first_frames(runner, "c"), expected)


@pytest.mark.parametrize(
    ("family", "chunk"), [("lingbot_world", world_chunk), ("matrix_game", game_chunk)]
)
def test_a_reload_forgets_the_clips_of_start_images(
    family: str, chunk: Any, make_runner: MakeRunner, tiny_checkpoint: Callable[..., Path]
) -> None:
    """A reload may replace the VAE's weights, so the latents of known start images are evicted."""
    first, second = (tiny_checkpoint(family, seed=seed) for seed in (0, 1))
    expected = chunk(Worker(make_runner(second)), "a", 0)["frames"]
    runner = make_runner(first)
    for index in range(12):
        chunk(Worker(runner), "a", index)
    chunk(Worker(runner), "b", 0)
    assert runner.sessions.get("b").condition.cache is None, "the start image is known"
    with torch.inference_mode():
        runner.reload_weights(weights_path=str(second))
    assert torch.equal(chunk(Worker(runner), "c", 0)["frames"], expected)


def test_a_reload_ends_every_session(make_runner: MakeRunner, causal_wan: Path) -> None:
    """A reload ends every session, because the K/V of each session was computed with the old
    weights.

    A chunk in flight fails. Sessions that start after the reload get frames generated with the new
    weights, even if the embeddings of their prompts were cached before it.
    """
    runner = make_runner(causal_wan, SMALL)
    worker = Worker(runner)
    expected = first_frames(runner, "old")
    first = {"prompt": "a field", "seed": 1}
    execute(runner, step(new=[new_request("r", session_id="busy", **first)]))
    with torch.inference_mode():
        runner.reload_weights()
    assert len(runner.sessions) == 0
    failure = execute(runner, step(running=["r"]))["r"]
    assert failure.code == "cancelled" and "weights were replaced" in failure.message
    execute(runner, step(finished=["r"]))
    for session_id, index in (("old", 1), ("busy", 1)):
        with pytest.raises(RequestFailed, match=r"^unknown_session: .*not live here"):
            worker.chunk(session_id, chunk_index=index)
    assert torch.equal(first_frames(runner, "old"), expected)


def test_a_reload_does_not_map_files(
    make_runner: MakeRunner, causal_wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload does not memory-map files, because this process would crash if another process
    truncated a mapped file.
    """
    runner = make_runner(causal_wan, SMALL)
    load, unmapped = type(runner.network).load_checkpoint, []

    def watched(network: Any, layout: Any) -> None:
        unmapped.append(tensor_files.reads_unmapped())
        load(network, layout)

    monkeypatch.setattr(type(runner.network), "load_checkpoint", watched)
    with torch.inference_mode():
        runner.reload_weights()
    assert unmapped == [True] and not tensor_files.reads_unmapped()


@pytest.mark.parametrize("given", [{"weights_iterator": iter(())}, {"is_checkpoint_format": False}])
def test_weights_are_reloaded_from_a_checkpoint_only(
    make_runner: MakeRunner, null_world: Path, given: dict[str, Any]
) -> None:
    runner = make_runner(null_world)
    with pytest.raises(
        ValueError,
        match=r"^reload_weights takes a checkpoint directory \(weights_path\) or nothing",
    ):
        runner.reload_weights(**given)


def test_dummy_weights_read_no_file(single_rank: None, null_world: Path, tmp_path: Path) -> None:
    """No weight file is read to load dummy weights. vLLM's worker requests dummy weights if another
    process will send the real weights later.
    """
    shutil.copytree(null_world, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    args = EngineArgs(
        model=str(tmp_path / "empty"),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    vllm_config = args.create_engine_config()
    with set_current_vllm_config(vllm_config), torch.inference_mode():
        runner = DiffusionGPUModelRunner(vllm_config, torch.device("cpu"))
        runner.load_model(load_dummy_weights=True)
    assert bytes_of(runner) == runner.model_memory_usage > 0


def test_the_session_store_trims_the_pool_of_the_model(
    make_runner: MakeRunner, causal_wan: Path
) -> None:
    runner = make_runner(causal_wan, SMALL)
    assert runner.sessions.trim_pool == runner.model.trim_pool
