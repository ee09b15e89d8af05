# SPDX-License-Identifier: Apache-2.0
"""Combinations of parallelism and options that cannot work are rejected before any process starts.

tests/engine/ runs the combinations that work (test_stage_hybrids.py, test_chunks_in_flight.py,
test_wan22_engine.py).
"""

import math
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_omni.engine_arguments.refusals import SCHEDULER_CLS, WORKER_CLS
from vllm_omni.model_executor.models.registry import get_family

PP2, PP3, TP2, TP3 = (
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 3},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 3},
)
OFFLOAD: dict[str, Any] = {"cpu_offload_gb": 1.0}
FP8: dict[str, Any] = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
MATCHED = {
    "cache": "noise_matched",
    "denoising_steps": [1000, 750],
    "video_denoising_steps": [700, 500],
}
TEMPORAL = {"pipeline": "temporal", "chunks_in_flight": 2}
NEEDS = "needs the previous one complete"


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
    causal_wan: Path,
    lingbot_world: Path,
    null_world: Path,
) -> dict[str, Path]:
    found = {"causal_wan": causal_wan, "lingbot_world": lingbot_world, "null_world": null_world}
    for name in ("wan2_2", "lance", "diffusers_pipeline", "matrix_game", "waypoint"):
        family, found[name] = get_family(name), tmp_path_factory.mktemp(name)
        family.make_tiny(found[name], 0, family.layouts[0])
    return found


def configure(model: Path, omni: dict[str, Any], sizes: dict[str, Any]) -> VllmConfig:
    """Create the engine configuration as `vllm serve` does before it starts any process."""
    return EngineArgs(
        model=str(model),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={"omni": {"height": 32, "width": 48, **omni}},
        **sizes,  # type: ignore[arg-type]
    ).create_engine_config()


@pytest.mark.parametrize(
    ("name", "omni", "sizes", "reason"),
    [
        (
            "lingbot_world",
            {"pipeline_partition": "measured"},
            PP2 | FP8,
            "cannot move quantized layers",
        ),
        (
            "causal_wan",
            {"chunks_in_flight": 2},
            {},
            "cache 'strict' shows a chunk the clean chunk before it",
        ),
        ("causal_wan", {**TEMPORAL}, PP2, "cache 'strict' shows a chunk the clean chunk before it"),
        (
            "causal_wan",
            {**TEMPORAL, "model": MATCHED},
            PP3,
            "got 3; pass --pipeline-parallel-size 2",
        ),
        ("causal_wan", {**TEMPORAL, "model": MATCHED}, {}, "pass --pipeline-parallel-size"),
        (
            "causal_wan",
            {**TEMPORAL, "model": MATCHED, "vae_stage": True},
            PP2,
            "2, or one more with omni.vae_stage",
        ),
        (
            "causal_wan",
            {"model": {"sequence_parallel": True}},
            TP3,
            "does not divide over 3 parallel ranks",
        ),
        ("causal_wan", {}, {"pipeline_parallel_size": 5}, "4 layers can not be cut into 5 stages"),
        ("causal_wan", {"pipeline_partition": [4, 1]}, PP2, "does not fit: 4 layers over 2 stages"),
        ("lingbot_world", TEMPORAL, PP2, NEEDS),
        ("lingbot_world", {"chunks_in_flight": 2}, {}, NEEDS),
        ("matrix_game", {"chunks_in_flight": 2}, {}, NEEDS),
        (
            "matrix_game",
            {
                "degradations": ["tiny_vae"],
                "scheduling": "deadline",
                "model": {"decoder": "tiny"},
            },
            {},
            "Matrix-Game",
        ),
        ("waypoint", {"chunks_in_flight": 2}, {}, NEEDS),
        (
            "waypoint",
            {"model": {"window_frames": 4}},
            {},
            "remove window_frames: this model's checkpoint fixes",
        ),
        ("waypoint", {"vae_parallel": True}, TP2, "cannot be split over ranks"),
        ("waypoint", {}, TP3, "does not divide over 3 parallel ranks"),
        ("waypoint", {}, {"pipeline_parallel_size": 5}, "4 layers can not be cut into 5 stages"),
        ("matrix_game", {}, TP3, "does not divide over 3 parallel ranks"),
        ("matrix_game", {"model": {"convention": "sglang"}}, {}, "omni.model"),
        ("lingbot_world", {}, TP3, "does not divide over 3 parallel ranks"),
        (
            "lingbot_world",
            {"pipeline_partition": [4, 1], "vae_stage": True},
            PP3,
            "does not fit: 4 layers",
        ),
        ("wan2_2", {"chunks_in_flight": 2}, PP2, NEEDS),
        ("wan2_2", {"model": {"cfg_parallel": True}}, PP2, "pass --tensor-parallel-size 2, got 1"),
        ("wan2_2", {"model": {"cfg_parallel": True}}, TP3, "pass --tensor-parallel-size 2, got 3"),
        (
            "wan2_2",
            {"model": {"cfg_parallel": True, "sequence_parallel": True}},
            TP2,
            "both take the tensor-parallel",
        ),
        ("wan2_2", {"vae_stage": True}, TP2, "--pipeline-parallel-size 2 or more"),
        ("lance", {"chunks_in_flight": 2}, {}, NEEDS),
        ("diffusers_pipeline", {"chunks_in_flight": 2}, {}, "it runs without a worker"),
        ("lance", {}, PP2, "its layers are not split over stages"),
        ("lance", {"vae_stage": True}, PP2 | TP2, "its layers are not split over stages"),
        ("diffusers_pipeline", {}, PP2, "uses one process and one device"),
        ("diffusers_pipeline", {}, TP2, "uses one process and one device"),
        (
            "lingbot_world",
            {"pipeline_partition": "measured"},
            PP2 | OFFLOAD,
            "cannot move layers in host memory",
        ),
        (
            "causal_wan",
            {"model": {"cuda_graphs": True}},
            OFFLOAD,
            "CUDA graphs cannot prefetch weights",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    checkpoints: dict[str, Path],
    name: str,
    omni: dict[str, Any],
    sizes: dict[str, int],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=r"omni|parallel|offload") as refused:
        configure(checkpoints[name], omni, sizes)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("name", "omni", "sizes"),
    [
        ("causal_wan", {**TEMPORAL, "model": MATCHED}, PP2),
        ("causal_wan", {**TEMPORAL, "model": MATCHED | {"sequence_parallel": True}}, PP2 | TP2),
        ("causal_wan", {**TEMPORAL, "model": MATCHED, "vae_stage": True}, PP3),
        ("causal_wan", {"chunks_in_flight": 2, "model": MATCHED, "vae_stage": True}, PP2 | TP2),
        ("causal_wan", {"vae_stage": True, "pipeline_partition": [3, 1]}, PP3 | TP2),
        ("causal_wan", {"model": {"cuda_graphs": True}}, PP2),
        ("lingbot_world", {"vae_stage": True}, PP3 | TP2),
        ("matrix_game", {"vae_stage": True}, PP3 | TP2),
        ("waypoint", {"vae_stage": True, "model": {"cuda_graphs": True}}, PP3 | TP2),
        ("matrix_game", {"model": {"cuda_graphs": True, "sequence_parallel": True}}, PP2 | TP2),
        (
            "lingbot_world",
            {"vae_stage": True, "model": {"cuda_graphs": True, "sequence_parallel": True}},
            PP2 | TP2,
        ),
        ("wan2_2", {"model": {"cfg_parallel": True}, "vae_stage": True}, PP3 | TP2),
    ],
)
def test_what_can_work_is_not_refused(
    checkpoints: dict[str, Path], name: str, omni: dict[str, Any], sizes: dict[str, int]
) -> None:
    """A combination that works is accepted, and the config hook selects this package's worker and
    scheduler.
    """
    config = configure(checkpoints[name], omni, sizes)
    assert config.parallel_config.world_size == math.prod(sizes.values())
    assert config.parallel_config.worker_cls == WORKER_CLS
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS


@pytest.mark.skipif(not current_platform.is_cpu(), reason="what a CPU has no kernel for")
def test_fp8_of_one_scale_for_a_whole_weight_needs_a_gpu(lingbot_world: Path) -> None:
    with pytest.raises(ValueError, match="vLLM has no kernel for it on a CPU; use fp8_per_channel"):
        configure(lingbot_world, {}, FP8 | {"quantization": "fp8_per_tensor"})


def test_fp8_needs_activations_of_two_bytes(lingbot_world: Path) -> None:
    with pytest.raises(ValueError, match="float32 is not supported for quantization"):
        configure(lingbot_world, {}, {"quantization": "fp8_per_channel"})
