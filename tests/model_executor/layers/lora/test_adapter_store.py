# SPDX-License-Identifier: Apache-2.0
"""The adapter store caches adapters in host memory and in GPU slots. Both caches evict the least
recently used adapter.
"""

from pathlib import Path

import pytest
import torch
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from torch import nn
from vllm.lora.request import LoRARequest

from vllm_omni.inputs import Lora, UsedLora
from vllm_omni.model_executor.layers.lora.active import active_adapters, addresses_key, weights_key
from vllm_omni.model_executor.layers.lora.store import (
    AdapterStore,
    NoAdapters,
    _skipped_line,
    named,
)
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.outputs import RequestFailed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, bias=False)
        self.requires_grad_(False)

    def adapter_targets(self) -> dict[str, AdapterTarget]:
        return {"transformer": AdapterTarget(self, {"layer.weight": (4, 4)})}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    target = Model().adapter_targets()["transformer"]
    return {
        f"n{seed}": files.write_community_ab(
            files.factors(target, ["layer"], seed), tmp_path / f"{seed}.safetensors"
        )
        for seed in range(4)
    }


def output_of(model: Model, store: AdapterStore, *choices: Lora) -> torch.Tensor:
    with store.applied(store.select(choices)):
        result: torch.Tensor = model.layer(torch.ones(1, 4))
    return result


def test_evicted_adapters_are_read_from_disk_again(paths: dict[str, Path]) -> None:
    """An evicted adapter that is read from disk again has the same weights. If its file has been
    deleted, only the request that names the adapter fails.
    """
    model = Model()
    store = make_store(model, paths, max_loras=1, max_cpu_loras=1)
    results = {name: output_of(model, store, Lora(name=name)) for name in paths}
    assert store.ids() == {1, 2, 3, 4}
    for name, expected in results.items():
        assert torch.equal(output_of(model, store, Lora(name=name)), expected)
    paths["n0"].unlink()
    with pytest.raises(RequestFailed, match="adapter 'n0' cannot be read any more"):
        store.select([Lora(name="n0")])
    assert torch.equal(output_of(model, store, Lora(name="n1")), results["n1"])


def test_an_overwritten_adapter_file_fails_only_the_request(
    paths: dict[str, Path],
) -> None:
    """An adapter file that has been truncated or replaced by another adapter's file is rejected.
    Once the original file is restored, the adapter can be used again.
    """
    model = Model()
    store = make_store(model, paths, max_loras=1, max_cpu_loras=1)
    expected, whole = output_of(model, store, Lora(name="n0")), paths["n0"].read_bytes()
    for data in (whole[: len(whole) // 2], paths["n1"].read_bytes()):
        output_of(model, store, Lora(name="n2"))
        paths["n0"].write_bytes(data)
        with pytest.raises(RequestFailed, match="adapter 'n0' cannot be read any more"):
            store.select([Lora(name="n0")])
    paths["n0"].write_bytes(whole)
    assert torch.equal(output_of(model, store, Lora(name="n0")), expected)


def test_an_adapter_loaded_in_place_takes_effect_at_the_next_chunk(
    paths: dict[str, Path],
) -> None:
    """An adapter that is reloaded in place keeps its name, and a chunk in flight keeps the weights
    that it started with.
    """
    model = Model()
    store = make_store(model, {"n0": paths["n0"]})
    before = store.select([Lora(name="n0")])
    with store.applied(before):
        old = model.layer(torch.ones(1, 4))
    assert not store.add_adapter(LoRARequest("n0", 1, str(paths["n0"])))
    with pytest.raises(ValueError, match="from another place"):
        store.add_adapter(LoRARequest("n0", 1, str(paths["n1"])))
    assert store.add_adapter(LoRARequest("n0", 1, str(paths["n1"]), load_inplace=True))
    assert before != store.select(named(before))
    assert not torch.equal(output_of(model, store, Lora(name="n0")), old)
    with store.applied(before):
        assert torch.equal(model.layer(torch.ones(1, 4)), old)


def test_weights_and_addresses_have_separate_keys(paths: dict[str, Path], tmp_path: Path) -> None:
    """A different scale, or another adapter with the same modules and rank, changes the key of the
    weights but not the key of their addresses. A CUDA graph captured with one adapter can therefore
    be replayed for the next adapter in the same slot.
    """
    target = Model().adapter_targets()["transformer"]
    higher = files.factors(target, ["layer"], seed=9, rank=3)
    paths = {**paths, "higher": files.write_community_ab(higher, tmp_path / "higher.safetensors")}
    store = make_store(Model(), paths, max_loras=1)
    keys = []
    for choice in (
        Lora(name="n0"),
        Lora(name="n0", scale=0.5),
        Lora(name="n1"),
        Lora(name="higher"),
        Lora(name="n0"),
    ):
        with store.applied(store.select([choice])):
            keys.append((weights_key(), addresses_key()))
    assert active_adapters() == ()
    (full, first), (half, same), (other, replaced), (_, larger), (again, back) = keys
    assert len({full, half, other}) == 3 and again == full
    assert first == same == replaced == back != larger


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([Lora(name="nowhere")], "no adapter 'nowhere'; there are: n0, n1, n2"),
        ([Lora(name="n0"), Lora(name="n0")], "must differ"),
        (
            [Lora(name="n0"), Lora(name="n1"), Lora(name="n2")],
            "3 adapters at once; this server takes --max-loras 2",
        ),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    choices: list[Lora], words: str, paths: dict[str, Path]
) -> None:
    with pytest.raises(RequestFailed, match=words):
        make_store(Model(), paths).select(choices)


def test_an_adapter_in_its_slot_takes_the_scale_of_each_request(paths: dict[str, Path]) -> None:
    """An adapter's effect is proportional to the scale that the request sets. After requests with
    other scales, a request with scale 1 gives results that are bit-identical to the original
    scale-1 results.
    """
    model = Model()
    store = make_store(model, paths, max_loras=1)
    plain = output_of(model, store)
    full = output_of(model, store, Lora(name="n0")) - plain
    half = output_of(model, store, Lora(name="n0", scale=0.5)) - plain
    assert full.abs().min() > 0
    torch.testing.assert_close(2 * half, full)
    assert torch.equal(output_of(model, store, Lora(name="n0", scale=1.0)) - plain, full)


def test_a_server_without_adapters_names_the_missing_flag() -> None:
    store = NoAdapters()
    assert store.select([]) == () and store.ids() == set()
    with pytest.raises(RequestFailed, match="without --enable-lora"):
        store.select([Lora(name="ink")])
    with pytest.raises(
        RequestFailed, match=r"the session uses adapter 'ink' .* runs without --enable-lora"
    ):
        store.select_saved([UsedLora(name="ink", digest="0" * 32)])
    with pytest.raises(ValueError, match="without --enable-lora"):
        store.add_adapter(LoRARequest("ink", 1, "nowhere"))


def test_a_removed_adapter_is_refused_by_name(paths: dict[str, Path]) -> None:
    store = make_store(Model(), paths)
    assert store.remove(1) and not store.remove(1)
    with pytest.raises(RequestFailed, match="no adapter 'n0'"):
        store.select([Lora(name="n0")])


def test_skipped_tensors_are_listed_once_for_all_blocks() -> None:
    """Skipped tensors are listed in one log line, and tensor names from the file cannot insert line
    breaks into that line.
    """
    names = [f"blocks.{n}.cross_attn.k_img.diff_b" for n in range(4)] + ["lora_te1\nx.alpha"]
    line = _skipped_line(names)
    assert line.endswith(r"skipped: blocks.N.cross_attn.k_img.diff_b (4), lora_te1\nx.alpha (1)")
    assert "and 10 kinds more" in _skipped_line([f"{'x' * n}.alpha" for n in range(30)])
