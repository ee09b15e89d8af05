# SPDX-License-Identifier: Apache-2.0
"""A LoRA is merged in fp32 while a checkpoint is being read, as W + scale B A. Error messages name
the tensor that causes the error.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_omni.model_executor.checkpoint.merged_lora import MergedSource
from vllm_omni.model_executor.checkpoint.tensor_files import TensorSource, open_tensors

RULES = ((r"^(base_model\.)?model\.", ""), (r"^model\.", ""))
BASE = {
    "model.a.weight": torch.ones(3, 4, dtype=torch.bfloat16),
    "model.b.weight": torch.zeros(2, 2),
}
DOWN, UP = torch.arange(8.0).reshape(2, 4), torch.arange(6.0).reshape(3, 2)


def source(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> TensorSource:
    save_file(tensors, folder / f"{name}.safetensors")
    return open_tensors(folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        ({"base_model.model.a.lora_A.weight": DOWN, "base_model.model.a.lora_B.weight": UP}, 1.0),
        (
            {
                "base_model.model.a.lora_A.default.weight": DOWN,
                "base_model.model.a.lora_B.default.weight": UP,
            },
            1.0,
        ),
        (
            {
                "model.a.lora_down.weight": DOWN,
                "model.a.lora_up.weight": UP,
                "model.a.alpha": torch.tensor(1.0),
            },
            0.5,
        ),
    ],
    ids=["peft", "peft with a name", "down and up"],
)
def test_a_lora_changes_its_weight_only(
    lora: dict[str, torch.Tensor], scale: float, tmp_path: Path
) -> None:
    merged = MergedSource.of_base(
        source(tmp_path, "base", BASE), source(tmp_path, "lora", lora), RULES
    )
    read = dict(merged.read_tensors(["model.a.weight", "model.b.weight"]))
    assert torch.equal(read["model.a.weight"], (1 + scale * (UP @ DOWN)).to(torch.bfloat16))
    assert torch.equal(read["model.b.weight"], BASE["model.b.weight"])
    assert merged.shapes == {"model.a.weight": (3, 4), "model.b.weight": (2, 2)}
    assert merged.dtypes["model.a.weight"] == torch.bfloat16


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"model.a.lora_A.weight": DOWN}, r"lora_A\.weight lacks its other half"),
        (
            {"model.c.lora_A.weight": DOWN, "model.c.lora_B.weight": UP},
            r"2 problems: model\.c\.lora_A\.weight belongs",
        ),
        ({"model.a.weight": DOWN}, r"model\.a\.weight belongs to no weight"),
        (
            {"model.a.lora_A.weight": DOWN, "model.a.lora_B.weight": DOWN + 1},
            r"\(2, 4\) x \(2, 4\) does not make \(3, 4\)",
        ),
        ({}, "it holds no tensors"),
        (
            {
                "model.a.lora_down.weight": DOWN[:0],
                "model.a.lora_up.weight": UP[:, :0],
                "model.a.alpha": torch.ones(()),
            },
            r"lora_down\.weight \(0, 4\) has rank 0",
        ),
        (
            {
                "model.a.lora_down.weight": DOWN,
                "model.a.lora_up.weight": UP,
                "model.a.alpha": torch.ones(2),
            },
            r"alpha \(2,\) is not one number",
        ),
    ],
    ids=["half", "elsewhere", "no LoRA", "shapes", "empty", "rank 0", "two alphas"],
)
def test_an_invalid_lora_is_refused_in_one_line(
    lora: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    base, other = source(tmp_path, "base", BASE), source(tmp_path, "lora", lora)
    with pytest.raises(ValueError, match=message) as refused:
        MergedSource.of_base(base, other, RULES)
    assert "\n" not in str(refused.value) and "lora.safetensors" in str(refused.value)


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    lora = {
        "model.a.lora_down.weight": DOWN,
        "model.a.lora_up.weight": UP,
        "model.a.alpha": torch.tensor(float("nan")),
    }
    merged = MergedSource.of_base(
        source(tmp_path, "base", BASE), source(tmp_path, "lora", lora), RULES
    )
    with pytest.raises(
        ValueError, match=r"lora\.safetensors: model\.a\.lora_up\.weight makes NaN or Inf"
    ):
        dict(merged.read_tensors(["model.a.weight"]))
