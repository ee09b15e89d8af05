# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2 adapters produce the same results as merging them into the weights. The tensor names or
the file name determines whether an adapter applies to one expert or to both.
"""

from pathlib import Path

import pytest
import torch
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.wan22_driver import finish, load_model, start
from safetensors.torch import load_file, save_file

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.models.wan2_2.pipeline import EXPERTS, Wan22

TOLERANCE = 2e-4
"""Tolerance for fp32 latents of magnitude 1 after four steps."""
HIGH, LOW = EXPERTS


def latents(model: Wan22, store: AdapterStore, lora: list[Lora]) -> torch.Tensor:
    selection = store.select(lora)
    with store.applied(selection):
        return finish(model, start(model, output="latents"))[1]["latents"]


def made(model: Wan22, seed: int) -> files.Factors:
    target = model.adapter_targets()[HIGH]
    return files.factors(target, files.attention_and_ffn(target), seed)


def one_of_both(tmp_path: Path, high: files.Factors, low: files.Factors) -> Path:
    """Write one file in diffusers' format that contains both experts' adapters."""
    first = load_file(
        files.write_diffusers(high, tmp_path / "first") / "pytorch_lora_weights.safetensors"
    )
    second = load_file(
        files.write_diffusers(low, tmp_path / "second") / "pytorch_lora_weights.safetensors"
    )
    second = {
        name.replace("transformer.", "transformer_2."): tensor for name, tensor in second.items()
    }
    save_file(first | second, tmp_path / "both.safetensors")
    return tmp_path / "both.safetensors"


def two_files(tmp_path: Path, high: files.Factors, low: files.Factors) -> Path:
    """Write one file per expert to a directory, in the layout of step-distillation adapters."""
    folder = tmp_path / "lightning"
    folder.mkdir()
    files.write_community_ab(high, folder / "high_noise_model.safetensors")
    files.write_community_ab(low, folder / "low_noise_model.safetensors")
    return folder


@pytest.mark.parametrize("write", [one_of_both, two_files])
def test_each_expert_has_its_adapter(
    write: object, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(checkpoints["t2v"])
    high, low = made(model, 1), made(model, 2)
    store = make_store(model, {"both": write(tmp_path, high, low)})  # type: ignore[operator]
    plain = latents(model, store, [])
    got = latents(model, store, [Lora(name="both", scale=0.5)])
    assert torch.equal(latents(model, store, []), plain)
    reference = load_model(checkpoints["t2v"])
    files.merge(reference.experts[HIGH], files.differences(high, 0.5))
    files.merge(reference.experts[LOW], files.differences(low, 0.5))
    expected = latents(reference, make_store(reference), [])
    assert not torch.allclose(expected, plain, atol=0.01)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("anime.safetensors", EXPERTS),
        ("wan22_HIGH_rank4.safetensors", (HIGH,)),
        ("slow_flow-low.safetensors", (LOW,)),
    ],
)
def test_the_file_name_selects_the_expert(
    name: str, experts: tuple[str, ...], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The file name selects the expert. If the file name identifies no expert, the adapter applies
    to both experts.
    """
    model = load_model(checkpoints["t2v"])
    own = made(model, 1)
    store = make_store(model, {"one": files.write_community_ab(own, tmp_path / name)})
    got = latents(model, store, [Lora(name="one")])
    reference = load_model(checkpoints["t2v"])
    for expert in experts:
        files.merge(reference.experts[expert], files.differences(own, 1.0))
    torch.testing.assert_close(
        got, latents(reference, make_store(reference), []), atol=TOLERANCE, rtol=0
    )
