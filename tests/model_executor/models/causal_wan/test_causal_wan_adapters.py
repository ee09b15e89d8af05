# SPDX-License-Identifier: Apache-2.0
"""An adapter in any naming convention produces the same stream as the merged weights W + scale *
alpha / rank * up @ down.

Without the adapter, the stream is bit-identical to the base model's. A tiny causal Wan model
generates the streams in fp32 and without an engine. The tensor names are those that each tool
writes (diffusers' `lora_conversion_utils.py`, musubi-tuner, LightX2V). PEFT itself writes the PEFT
adapter file.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from causal_wan_driver import load_model, make_request, open_session
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.chunks import run_adapted
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan

TOLERANCE = 2e-4
"""Tolerance for fp32 latents of magnitude 1 after two chunks of five passes. Results are not
bit-identical, because adapters change the order of summation.
"""
OPTIONS = {"window_frames": 9, "sink_frames": 3}
CHUNKS = 2


def run(
    model: CausalWan, store: AdapterStore, choices: Sequence[Lora], chunks: int = CHUNKS
) -> list[torch.Tensor]:
    """Return the latents of a new stream that uses the same adapters for all chunks."""
    session = open_session(model, output="latents")
    return run_adapted(
        model,
        store,
        [choices] * chunks,
        lambda: make_request(session, prompt="a beach", output="latents"),
    )


def assert_close(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


def assert_equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def plain(causal_wan: Path) -> list[torch.Tensor]:
    model = load_model(causal_wan, **OPTIONS)
    return run(model, make_store(model), [])


@pytest.fixture
def model(causal_wan: Path) -> CausalWan:
    return load_model(causal_wan, **OPTIONS)


def target_of(model: CausalWan) -> AdapterTarget:
    return model.adapter_targets()["transformer"]


def merged(checkpoint: Path, changes: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the latents of a stream with `changes` merged into the weights."""
    model = load_model(checkpoint, **OPTIONS)
    files.merge(model.transformer, changes)
    model.transformer.clear_derived()
    model.prompts.clear_prompt()
    return run(model, make_store(model), [])


STYLES: dict[str, tuple[Callable[[files.Factors, Path], Path], float]] = {
    "community": (files.write_community, files.ALPHA / files.RANK),
    "community, A and B": (files.write_community_ab, 1.0),
    "kohya": (files.write_kohya, files.ALPHA / files.RANK),
    "DiffSynth": (
        lambda made, path: files.write_community(made, path, ""),
        files.ALPHA / files.RANK,
    ),
    "diffusers": (lambda made, path: files.write_diffusers(made, path.with_suffix("")), 1.0),
    "diffusers with settings": (
        lambda made, path: files.write_diffusers(
            made, path.with_suffix(""), {"transformer.r": files.RANK, "transformer.lora_alpha": 8}
        ),
        8 / files.RANK,
    ),
    "PEFT": (
        lambda made, path: files.write_peft(made, path.with_suffix("")),
        files.ALPHA / files.RANK,
    ),
    "PEFT, rank-stabilised": (
        lambda made, path: files.write_peft(made, path.with_suffix(""), use_rslora=True),
        files.ALPHA / files.RANK**0.5,
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_an_adapter_of_each_style_equals_merged_weights(
    style: str, model: CausalWan, causal_wan: Path, plain: list[torch.Tensor], tmp_path: Path
) -> None:
    """An adapter for all layers with a scale of 0.7 produces the same latents as merged weights. A
    later stream without the adapter is bit-identical to the base model's.
    """
    write, scaling = STYLES[style]
    made = files.factors(target_of(model), files.attention_and_ffn(target_of(model)), seed=1)
    store = make_store(model)
    assert store.add_adapter(LoRARequest("ink", 1, str(write(made, tmp_path / "ink.safetensors"))))
    expected = merged(causal_wan, files.differences(made, 0.7 * scaling))
    assert not torch.allclose(expected[0], plain[0], atol=0.01), "the adapter has an effect"
    assert_close(run(model, store, [Lora(name="ink", scale=0.7)]), expected)
    assert_equal(run(model, store, []), plain)


def test_an_adapter_written_by_peft_equals_pefts_merged_weights(
    model: CausalWan, causal_wan: Path, tmp_path: Path
) -> None:
    """An adapter written by PEFT produces the same latents as the weights that PEFT itself merges.
    PEFT adapts a network with the same layer names.
    """
    from peft import LoraConfig, get_peft_model
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkvo"})

    network = nn.Module()
    network.blocks = nn.ModuleList([Block() for _ in range(4)])
    network.config = {"model_type": "custom"}  # type: ignore[assignment]
    settings = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q", "o"],
        init_lora_weights=False,
        alpha_pattern={"o": 2},
    )
    torch.manual_seed(0)
    adapted = get_peft_model(network, settings)  # type: ignore[arg-type]
    adapted.save_pretrained(str(tmp_path / "peft"))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    whole = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in before.items()
        if "lora_" not in name
    }
    after = adapted.merge_and_unload().state_dict()
    changes = {
        name: after[name] - tensor for name, tensor in whole.items() if name.endswith("weight")
    }
    store = make_store(model)
    store.add_adapter(LoRARequest("peft", 1, str(tmp_path / "peft")))
    got = run(model, store, [Lora(name="peft")])
    assert_close(
        got, merged(causal_wan, {name: change for name, change in changes.items() if change.any()})
    )


def test_several_adapters_add_up_each_at_its_scale(
    model: CausalWan, causal_wan: Path, tmp_path: Path
) -> None:
    """The effects of adapters with different ranks and layers are added, each with its own
    scale.
    """
    target = target_of(model)
    ink = files.factors(target, files.attention_and_ffn(target), seed=1)
    wool = files.factors(
        target, ["blocks.1.self_attn.k", "blocks.3.ffn.0", "blocks.3.cross_attn.v"], seed=2, rank=7
    )
    store = make_store(model)
    store.add_adapter(
        LoRARequest("ink", 1, str(files.write_community_ab(ink, tmp_path / "ink.safetensors")))
    )
    store.add_adapter(
        LoRARequest("wool", 2, str(files.write_community_ab(wool, tmp_path / "wool.safetensors")))
    )
    changes = files.differences(ink, 0.5)
    for name, change in files.differences(wool, -1.5).items():
        changes[name] = changes[name] + change
    got = run(model, store, [Lora(name="ink", scale=0.5), Lora(name="wool", scale=-1.5)])
    assert_close(got, merged(causal_wan, changes))


def test_a_step_distillation_adapter_changes_every_tensor(
    model: CausalWan, causal_wan: Path, plain: list[torch.Tensor], tmp_path: Path
) -> None:
    """A step-distillation adapter, such as LightX2V's, changes every tensor. It contains factors
    for the embeddings and the head, and differences for biases, norms, modulation and whole
    weights.
    """
    target = target_of(model)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(*shape, generator=generator)

    made = files.factors(
        target, [name for name in target.matrices() if name != "head.head"], seed=1, size=0.1
    )
    stored: dict[str, torch.Tensor] = {}
    changes = files.differences(made, 1.0)
    for module, (down, up) in made.items():
        stored[f"diffusion_model.{module}.lora_down.weight"] = down
        stored[f"diffusion_model.{module}.lora_up.weight"] = up
    stored["diffusion_model.patch_embedding.lora_down.weight"] = made["patch_embedding"][0].reshape(
        -1, 16, 1, 2, 2
    )
    stored["diffusion_model.patch_embedding.lora_up.weight"] = made["patch_embedding"][1].reshape(
        -1, 4, 1, 1, 1
    )
    for module in target.matrices():
        if f"{module}.bias" in target.shapes:
            changes[f"{module}.bias"] = stored[f"diffusion_model.{module}.diff_b"] = random(
                target.shapes[f"{module}.bias"][0]
            )
    for name, shape in target.shapes.items():
        if "norm" in name:
            end = ".diff" if name.endswith("weight") else ".diff_b"
            changes[name] = stored[f"diffusion_model.{name.rpartition('.')[0]}{end}"] = random(
                *shape
            )
        elif name.endswith("modulation"):
            changes[name] = stored[f"diffusion_model.{name.rpartition('.')[0]}.diff_m"] = random(
                *shape
            )
    changes["head.head.weight"] = stored["diffusion_model.head.head.diff"] = random(
        *target.shapes["head.head.weight"]
    )
    assert changes.keys() == target.shapes.keys(), "every tensor of the network"
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        tmp_path / "steps.safetensors",
    )
    store = make_store(model)
    store.add_adapter(LoRARequest("steps", 1, str(tmp_path / "steps.safetensors")))
    expected = merged(causal_wan, {name: 0.8 * change for name, change in changes.items()})
    assert not torch.allclose(expected[0], plain[0], atol=0.01)
    before = {name: tensor.clone() for name, tensor in model.transformer.named_parameters()}
    assert_close(run(model, store, [Lora(name="steps", scale=0.8)]), expected)
    assert_equal(run(model, store, []), plain)
    for name, tensor in model.transformer.named_parameters():
        assert torch.equal(tensor, before[name]), f"{name} is restored bit for bit"


def test_adapters_that_share_slots_leave_no_trace(
    model: CausalWan, plain: list[torch.Tensor], tmp_path: Path
) -> None:
    """When three adapters share two slots, each stream equals the same stream run alone, whichever
    adapter its slot contained before.
    """
    target = target_of(model)
    store = make_store(model)
    for number in (1, 2, 3):
        made = files.factors(target, files.attention_and_ffn(target), seed=number, rank=2 * number)
        path = files.write_community(made, tmp_path / f"{number}.safetensors")
        store.add_adapter(LoRARequest(str(number), number, str(path)))
    alone = {number: run(model, store, [Lora(name=str(number))]) for number in (1, 2, 3)}
    for number in (3, 1, 2, 1):
        assert_equal(run(model, store, [Lora(name=str(number))]), alone[number])
        assert_equal(run(model, store, []), plain)
    assert_equal(run(model, store, [Lora(name="1", scale=0.0)]), plain)


def _compare(
    rank: int, rendezvous: str, checkpoint: str, path: str, sequence_parallel: bool
) -> None:
    with process_group(rank, 2, rendezvous) as group:
        choices = [Lora(name="steps", scale=0.8)]
        streams = []
        for parallel in (
            ParallelContext(),
            ParallelContext(rank, 2, group, sequence_parallel=sequence_parallel),
        ):
            model = load_model(Path(checkpoint), parallel, **OPTIONS)
            store = make_store(model, {"steps": Path(path)})
            streams.append([*run(model, store, choices), *run(model, store, [])])
        assert_close(streams[1], streams[0])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_with_adapters_equal_one(
    sequence_parallel: bool, causal_wan: Path, tmp_path: Path
) -> None:
    """Two ranks, each of which applies its own shard of an adapter, produce the same latents as one
    rank. The adapter contains factors for all layers, and differences for biases and norms.
    """
    target = files.causal_wan_target(causal_wan)
    path = files.write_community(
        files.factors(target, files.attention_and_ffn(target), seed=1), tmp_path / "a.safetensors"
    )
    generator = torch.Generator().manual_seed(2)
    stored = load_file(path)
    for name, size in {
        "self_attn.o.diff_b": 64,
        "ffn.0.diff_b": 112,
        "self_attn.norm_q.diff": 64,
    }.items():
        stored[f"diffusion_model.blocks.1.{name}"] = 0.1 * torch.randn(size, generator=generator)
    save_file(stored, path)
    run_ranks(
        _compare, (str(tmp_path / "rendezvous"), str(causal_wan), str(path), sequence_parallel), 2
    )
