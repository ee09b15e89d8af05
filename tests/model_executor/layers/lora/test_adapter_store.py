# SPDX-License-Identifier: Apache-2.0
"""Which adapters are known, on the host and in slots: room is made for the least recently used,
on both.
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


def out(model: Model, store: AdapterStore, *choices: Lora) -> torch.Tensor:
    with store.applied(store.select(choices)):
        result: torch.Tensor = model.layer(torch.ones(1, 4))
    return result


def test_adapters_beyond_the_host_s_room_are_read_again(paths: dict[str, Path]) -> None:
    """The same weights come back; a file that has gone since refuses the request alone."""
    model = Model()
    store = make_store(model, paths, max_loras=1, max_cpu_loras=1)
    results = {name: out(model, store, Lora(name=name)) for name in paths}
    assert store.ids() == {1, 2, 3, 4}
    for name, expected in results.items():
        assert torch.equal(out(model, store, Lora(name=name)), expected)
    paths["n0"].unlink()
    with pytest.raises(RequestFailed, match="adapter 'n0' cannot be read any more"):
        store.select([Lora(name="n0")])
    assert torch.equal(out(model, store, Lora(name="n1")), results["n1"])


def test_an_adapter_s_file_that_is_written_over_refuses_the_request_alone(
    paths: dict[str, Path],
) -> None:
    """Half a file, or another adapter's, where the loaded one was; once the file is back, so is
    the adapter.
    """
    model = Model()
    store = make_store(model, paths, max_loras=1, max_cpu_loras=1)
    expected, whole = out(model, store, Lora(name="n0")), paths["n0"].read_bytes()
    for data in (whole[: len(whole) // 2], paths["n1"].read_bytes()):
        out(model, store, Lora(name="n2"))
        paths["n0"].write_bytes(data)
        with pytest.raises(RequestFailed, match="adapter 'n0' cannot be read any more"):
            store.select([Lora(name="n0")])
    paths["n0"].write_bytes(whole)
    assert torch.equal(out(model, store, Lora(name="n0")), expected)


def test_an_adapter_loaded_in_place_is_another_from_the_next_chunk_on(
    paths: dict[str, Path],
) -> None:
    """Its name stays; a chunk at work keeps the weights that it began with."""
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
    assert not torch.equal(out(model, store, Lora(name="n0")), old)
    with store.applied(before):
        assert torch.equal(model.layer(torch.ones(1, 4)), old)


def test_keys_report_weights_and_addresses_apart(paths: dict[str, Path], tmp_path: Path) -> None:
    """Another strength, or another adapter of the same modules and ranks, is other weights at the
    same addresses: what was captured with one slot's adapter serves the next one there."""
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
def test_requests_that_no_server_can_serve(
    choices: list[Lora], words: str, paths: dict[str, Path]
) -> None:
    with pytest.raises(RequestFailed, match=words):
        make_store(Model(), paths).select(choices)


def test_an_adapter_of_strength_0_takes_no_slot(paths: dict[str, Path]) -> None:
    model = Model()
    store = make_store(model, paths, max_loras=1)
    expected = out(model, store, Lora(name="n1"))
    assert torch.equal(out(model, store, Lora(name="n0", scale=0), Lora(name="n1")), expected)


def test_an_adapter_in_its_slot_takes_each_requests_strength(paths: dict[str, Path]) -> None:
    """Back to 1 as well, which a slot has from the start; the difference that it makes is in
    proportion.
    """
    model = Model()
    store = make_store(model, paths, max_loras=1)
    plain = out(model, store)
    full = out(model, store, Lora(name="n0")) - plain
    half = out(model, store, Lora(name="n0", scale=0.5)) - plain
    assert full.abs().min() > 0
    torch.testing.assert_close(2 * half, full)
    assert torch.equal(out(model, store, Lora(name="n0", scale=1.0)) - plain, full)


def test_a_server_without_adapters_says_so() -> None:
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


def test_a_evicted_adapter_is_refused_by_name(paths: dict[str, Path]) -> None:
    store = make_store(Model(), paths)
    assert store.remove(1) and not store.remove(1)
    with pytest.raises(RequestFailed, match="no adapter 'n0'"):
        store.select([Lora(name="n0")])


def test_skipped_tensors_are_listed_once_for_all_blocks() -> None:
    """In one line that a file's names cannot break."""
    names = [f"blocks.{n}.cross_attn.k_img.diff_b" for n in range(4)] + ["lora_te1\nx.alpha"]
    line = _skipped_line(names)
    assert line.endswith(r"skipped: blocks.N.cross_attn.k_img.diff_b (4), lora_te1\nx.alpha (1)")
    assert "and 10 kinds more" in _skipped_line([f"{'x' * n}.alpha" for n in range(30)])
