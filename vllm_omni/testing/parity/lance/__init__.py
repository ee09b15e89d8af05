# SPDX-License-Identifier: Apache-2.0
"""Compares Lance with golden files: decoder, latents, packing, the sampling of each task, vision
tower and autoencoder.

All sizes are read from the recordings and their metadata, so golden files may use any sizes,
prompts and seeds. `recorded.py` defines the tolerances.
"""

from pathlib import Path

import torch

from vllm_omni.model_executor.models.lance.config import TASKS, Task
from vllm_omni.testing.parity.comparison import ComparisonReport, GoldenScenario, run_scenarios
from vllm_omni.testing.parity.lance.autoencoder import VAE_WEIGHTS, run_report, run_vae
from vllm_omni.testing.parity.lance.recorded import WEIGHTS, Bf16Judge, Fp32Judge, ToyModel
from vllm_omni.testing.parity.lance.stages import compare_tables, compare_text, compare_velocity
from vllm_omni.testing.parity.lance.tasks import VARIANTS, TaskInputs, compare_packing, compare_task


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "lance",
        golden_dir,
        {
            "golden_fp32.safetensors": run_fp32,
            "golden_bf16.safetensors": run_bf16,
            "golden_vae.safetensors": run_vae,
            "report_vae_vit.json": run_report,
        },
        auxiliary=("README*", ".*", "meta_*.json", WEIGHTS, VAE_WEIGHTS),
    )


def run_fp32(scenario: GoldenScenario) -> None:
    model = ToyModel(scenario.directory, "fp32", torch.float32)
    compare_text(scenario, model, Fp32Judge(scenario))
    compare_velocity(scenario, model, Fp32Judge(scenario))
    compare_tables(scenario, model)
    for name in _recorded(scenario):
        task, variant = _split(name)
        inputs = TaskInputs.read_scenario(scenario, model, task)
        if not variant:
            compare_packing(scenario, model, inputs)
        compare_task(scenario, model, inputs, variant, Fp32Judge(scenario))


def run_bf16(scenario: GoldenScenario) -> None:
    """Compare only the final results in bf16. The inputs come from the fp32 recording in the same
    directory.
    """
    inputs_file = GoldenScenario(
        scenario.directory / "golden_fp32.safetensors", ComparisonReport("lance", "inputs")
    )
    model = ToyModel(scenario.directory, "bf16", torch.bfloat16)
    judge = Bf16Judge(scenario, inputs_file)
    compare_text(inputs_file, model, judge)
    compare_velocity(inputs_file, model, judge)
    for name in _recorded(scenario):
        task, variant = _split(name)
        compare_task(
            inputs_file, model, TaskInputs.read_scenario(inputs_file, model, task), variant, judge
        )


def _recorded(scenario: GoldenScenario) -> list[str]:
    prefixes = {name.split(".")[0] for name in scenario.tensors} - {"a", "b", "c"}
    return sorted(prefixes, key=lambda name: (len(name.split("_")), name))


def _split(name: str) -> tuple[Task, str]:
    for task in TASKS:
        variant = name.removeprefix(task).removeprefix("_")
        if name.startswith(task) and variant in VARIANTS:
            return task, variant
    raise ValueError(f"{name!r} is no task of this model")
