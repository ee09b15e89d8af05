# SPDX-License-Identifier: Apache-2.0
"""Tests of adapter files: accepted tensor names and shapes, and the one-line errors (with counts
and examples) for faulty files.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_musubi_wan_lora_to_diffusers,
)
from helpers import lora_files as files
from safetensors.torch import load_file, save_file

from vllm_omni.model_executor.layers.lora.adapter import AdapterWeights, TargetNames, load_adapter
from vllm_omni.model_executor.layers.lora.target import AdapterTarget

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(causal_wan: Path) -> AdapterTarget:
    return files.causal_wan_target(causal_wan)


def load(target: AdapterTarget, path: Path, max_rank: int = 8) -> AdapterWeights:
    names = TargetNames(
        frozenset(("transformer", module) for module in target.matrices()),
        frozenset(
            ("transformer", name) for name in target.shapes if target.vector(name) is not None
        ),
    )
    return load_adapter(str(path), {"transformer": target}, max_rank, torch.float32, names)


def some_factors(target: AdapterTarget) -> files.Factors:
    return files.factors(target, [f"blocks.{n}.self_attn.q" for n in range(4)], seed=1)


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "another model": (
        lambda t: {
            f"diffusion_model.double_blocks.{n}.proj.lora_A.weight": torch.zeros(1, 1)
            for n in range(4)
        },
        r"modules that this model lacks or keeps as they are: 4 \((.*double_blocks.*, ){3}\.\.\.\)",
    ),
    "only a text encoder's": (
        lambda t: {"lora_te1_text_model_encoder.lora_down.weight": torch.zeros(4, 4)},
        r"lacks or keeps as they are: 1 \(lora_te1_",
    ),
    "another width": (
        lambda t: {n: v[:, :-1].contiguous() if "down" in n else v for n, v in t.items()},
        r"misshapen: 4 \(.*lora_down\.weight \(4, 63\) instead of \(4, 64\)",
    ),
    "half of it": (
        lambda t: {n: v for n, v in t.items() if "up" not in n},
        r"without their other half: 4 \(",
    ),
    "ranks that differ": (
        lambda t: {n: v[:, :-1].contiguous() if "lora_up" in n else v for n, v in t.items()},
        r"misshapen: 4 \(.*lora_up\.weight \(64, 3\) instead of \(64, 4\)",
    ),
    "DoRA": (
        lambda t: {**t, "diffusion_model.blocks.0.self_attn.q.dora_scale": torch.zeros(64, 1)},
        r"of no LoRA adapter: 1 \(.*dora_scale\)",
    ),
    "LoHa": (
        lambda t: {"blocks.0.ffn.0.hada_w1_a": torch.zeros(4, 4)},
        r"of no LoRA adapter: 1 \(.*hada_w1_a\)",
    ),
    "rank 0": (
        lambda t: {n: v[:0] if "down" in n else v[:, :0] if "up" in n else v for n, v in t.items()},
        r"of rank 0: 4 \(.*lora_down\.weight",
    ),
    "integers": (
        lambda t: {n: v.to(torch.int8) if "up" in n else v for n, v in t.items()},
        r"of a dtype that is no float: 4 \(.*lora_up\.weight",
    ),
    "alpha that is NaN": (
        lambda t: {n: torch.tensor(float("nan")) if "alpha" in n else v for n, v in t.items()},
        r"has NaN or Inf in 4 \(.*alpha",
    ),
    "NaN in eight bits": (
        lambda t: {
            n: torch.full_like(v, float("nan")).to(torch.float8_e4m3fn) for n, v in t.items()
        },
        r"has NaN or Inf in 12 \(",
    ),
    "too strong": (
        lambda t: {n: torch.tensor(3e38) if "alpha" in n else v * 10 for n, v in t.items()},
        r"is too strong for torch\.float32: NaN or Inf in 4 \(transformer\.blocks",
    ),
    "NaN": (lambda t: {n: v * float("nan") for n, v in t.items()}, r"has NaN or Inf in 12 \("),
    "a whole big matrix": (
        lambda t: {"diffusion_model.blocks.0.ffn.0.diff": torch.zeros(112, 64)},
        r"of a rank above --max-lora-rank 8: 1 \(blocks\.0\.ffn\.0 64\)",
    ),
    "a rank above the limit": (
        lambda t: {
            n: v.repeat(3, 1) if "down" in n else v.repeat(1, 3) if "up" in n else v
            for n, v in t.items()
        },
        r"rank above --max-lora-rank 8: 4 \(blocks\.0\.self_attn\.q 12, .*, \.\.\.\)",
    ),
    "a misshapen norm": (
        lambda t: {"diffusion_model.blocks.0.self_attn.norm_q.diff": torch.zeros(63)},
        r"misshapen: 1 \(.*norm_q\.diff \(63,\) instead of \(64,\)\)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_faulty_file_is_refused_in_one_line(
    kind: str, target: AdapterTarget, tmp_path: Path
) -> None:
    change, words = REFUSED[kind]
    path = files.write_community(some_factors(target), tmp_path / "a.safetensors")
    save_file(change(load_file(path)), tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=words) as refusal:
        load(target, tmp_path / "b.safetensors")
    assert "\n" not in str(refusal.value)


def _with_image_layers(tensors: Tensors) -> Tensors:
    """Add the image layers that Wan 2.1 I2V adapters contain, because that model is conditioned on
    a start image.
    """
    name = "diffusion_model.blocks.0.cross_attn"
    more = {f"{name}.k_img.lora_down.weight": (4, 64), f"{name}.k_img.lora_up.weight": (64, 4)}
    more |= {f"{name}.k_img.diff_b": (64,), f"{name}.norm_k_img.diff": (64,)}
    return {**tensors, **{name: torch.zeros(shape) for name, shape in more.items()}}


SKIPPED: dict[str, tuple[Callable[[Tensors], Tensors], int, int]] = {
    "layers for the start image": (_with_image_layers, 4, 4),
    "more layers": (
        lambda t: {name.replace("blocks.0", "blocks.77"): tensor for name, tensor in t.items()},
        3,
        3,
    ),
    "a text encoder's": (
        lambda t: {**t, "lora_te1_text_model_encoder.lora_down.weight": torch.zeros(4, 4)},
        1,
        4,
    ),
    "a text encoder's by another method": (
        lambda t: {**t, "lora_te1_mlp.hada_w1_a": torch.zeros(4, 4)},
        1,
        4,
    ),
    "one module of another width": (
        lambda t: {
            n: v[:, :-1].contiguous() if "blocks.1" in n and "down" in n else v
            for n, v in t.items()
        },
        3,
        3,
    ),
    "a norm of another width": (
        lambda t: {**t, "diffusion_model.blocks.0.self_attn.norm_q.diff": torch.zeros(63)},
        1,
        4,
    ),
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_tensors_that_do_not_fit_are_skipped_and_listed(
    kind: str, target: AdapterTarget, tmp_path: Path
) -> None:
    """Tensors that do not fit are skipped and listed. All other adapted modules get the same
    weights as from a file without such tensors.
    """
    change, num_skipped, num_modules = SKIPPED[kind]
    path = files.write_community(some_factors(target), tmp_path / "a.safetensors")
    plain = load(target, path)
    save_file(change(load_file(path)), tmp_path / "b.safetensors")
    weights = load(target, tmp_path / "b.safetensors")
    assert (len(weights.skipped), len(weights.matrices), plain.skipped) == (
        num_skipped,
        num_modules,
        (),
    )
    for position, difference in weights.matrices.items():
        torch.testing.assert_close(difference.up, plain.matrices[position].up)
    assert weights.digest != plain.digest


def test_every_rank_finds_the_faults_of_the_whole_file(
    target: AdapterTarget, tmp_path: Path
) -> None:
    """Every rank checks the whole adapter file, so even a rank that does not hold the faulty module
    rejects the file.
    """
    path = files.write_community(some_factors(target), tmp_path / "a.safetensors")
    save_file(
        {name: tensor * float("nan") for name, tensor in load_file(path).items()},
        tmp_path / "b.safetensors",
    )
    nothing = TargetNames(frozenset(), frozenset())
    with pytest.raises(ValueError, match="has NaN or Inf in 12"):
        load_adapter(
            str(tmp_path / "b.safetensors"), {"transformer": target}, 8, torch.float32, nothing
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
        ({"r": 0}, "must be a positive integer"),
        ({"lora_alpha": None}, "cannot be read"),
        (
            {"lora_alpha": float("nan")},
            r"strength of blocks\.0\.self_attn\.q \(lora_alpha over r\) is nan",
        ),
        ({"lora_alpha": float("inf")}, "is inf, not a finite number"),
        ({"lora_alpha": 10**400}, "cannot be read"),
        ({"r": 1e-320}, "is inf, not a finite number"),
        (
            {"alpha_pattern": {"blocks.1.self_attn.q": float("nan")}},
            r"strength of blocks\.1\.self_attn\.q",
        ),
        (
            {"alpha_pattern": {"blocks.1.self_attn.q": "much"}},
            r"settings of blocks\.1\.self_attn\.q cannot be read",
        ),
        ({"alpha_pattern": {"blocks.(": 2}}, "cannot be read"),
        ({"rank_pattern": {"blocks.1.self_attn.q": 10**400}}, "cannot be read"),
    ],
)
def test_peft_settings_that_cannot_be_served_are_refused(
    settings: dict[str, object], words: str, target: AdapterTarget, tmp_path: Path
) -> None:
    """vLLM's own reader determines which PEFT settings are supported."""
    folder = files.write_peft(some_factors(target), tmp_path / "peft", **settings)
    with pytest.raises(ValueError, match=words) as refusal:
        load(target, folder)
    assert "\n" not in str(refusal.value)


def test_settings_apply_to_the_modules_they_name(target: AdapterTarget, tmp_path: Path) -> None:
    """PEFT's `alpha_pattern` changes only the scales of the modules that it names."""
    made = some_factors(target)
    folder = files.write_peft(made, tmp_path / "peft", alpha_pattern={"blocks.1.self_attn.q": 8})
    weights = load(target, folder)
    for index, scaling in ((0, 0.5), (1, 2.0)):
        module = f"blocks.{index}.self_attn.q"
        torch.testing.assert_close(
            weights.matrices["transformer", module].up, made[module][1] * scaling
        )


def test_a_path_must_lead_to_one_complete_safetensors_file(
    target: AdapterTarget, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        files.write_community(some_factors(target), tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ValueError, match=r"holds 2 \*\.safetensors files \(one\.safetensors, two\.safetensors\)"
    ):
        load(target, tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        load(target, tmp_path / "three")
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"is no \.safetensors file"):
        load(target, tmp_path / "pickle.bin")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes()[:-10])
    with pytest.raises(ValueError, match="no complete safetensors file"):
        load(target, tmp_path / "cut.safetensors")


def test_broken_metadata_is_refused_in_one_line(target: AdapterTarget, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = load_file(files.write_community_ab(some_factors(target), path))
    for text in (
        "[]",
        "nonsense",
        json.dumps({"transformer.r": "four", "transformer.lora_alpha": 4}),
    ):
        save_file(tensors, path, metadata={"lora_adapter_metadata": text})
        with pytest.raises(ValueError, match=r"its (metadata|settings)") as refusal:
            load(target, path)
        assert "\n" not in str(refusal.value)


def test_a_digest_changes_with_tensors_scale_and_dtype(
    target: AdapterTarget, tmp_path: Path
) -> None:
    """All ranks compute the same digest for an adapter, including ranks that hold none of the
    adapted layers. A change to the tensors, the scale or the dtype changes the digest.
    """
    made = some_factors(target)
    path = files.write_community(made, tmp_path / "a.safetensors")
    digest = load(target, path).digest
    nothing = TargetNames(frozenset(), frozenset())
    others = load_adapter(str(path), {"transformer": target}, 8, torch.float32, nothing)
    assert others.digest == digest and not others.matrices
    same = files.write_community(made, tmp_path / "same.safetensors")
    assert load(target, same).digest == digest
    tensors = load_file(path)
    last = sorted(tensors)[-1]
    save_file({**tensors, last: tensors[last] + 1e-3}, tmp_path / "changed.safetensors")
    found = {digest, load(target, tmp_path / "changed.safetensors").digest}
    found |= {
        load(target, files.write_peft(made, tmp_path / f"{alpha}", lora_alpha=alpha)).digest
        for alpha in (2, 4)
    }
    found.add(load_adapter(str(path), {"transformer": target}, 8, torch.bfloat16, nothing).digest)
    assert len(found) == 5


def test_diffusers_converter_gives_the_same_modules(target: AdapterTarget) -> None:
    """The diffusers converter maps a complete adapter to the same modules as this package does.

    This package parses community tensor names itself, because the diffusers converters refuse
    adapters that contain only some of the layers, and drop the weight differences of norms.
    """
    layers = [f"blocks.0.{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    layers += ["blocks.0.ffn.0", "blocks.0.ffn.2"]
    factors = {"lora_down.weight": (4, 8), "lora_up.weight": (8, 4), "alpha": ()}
    musubi = {
        f"lora_unet_{layer.replace('.', '_')}.{end}": torch.ones(shape)
        for layer in layers
        for end, shape in factors.items()
    }
    converted = _convert_musubi_wan_lora_to_diffusers(musubi)
    theirs = {name.removeprefix("transformer.").rsplit(".lora_", 1)[0] for name in converted}
    assert {target.module_named(name) for name in theirs} == {
        target.module_named(layer) for layer in layers
    }
