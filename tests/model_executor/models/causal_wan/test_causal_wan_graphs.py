# SPDX-License-Identifier: Apache-2.0
"""Streams with CUDA graphs are bit-identical to streams without them.

On a CPU, a simulated "graph" reruns the forward pass with the host-side decisions made during
capture, so an incomplete graph key would change the latents.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import load_model, open_session, run_chunk, stream
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.host_capture import hold

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs

CHUNKS = 14
OPTIONS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "no sinks": ({"window_frames": 6, "sink_frames": 0}, 3 * 2, 0, 8),
    "sinks": ({"window_frames": 9, "sink_frames": 3}, 4 * 2, 0, 10),
    "fixed sinks": (
        {"window_frames": 9, "sink_frames": 3, "sink_position": "absolute"},
        4 * 2,
        0,
        10,
    ),
    "renewed sinks": (
        {
            "window_frames": 5,
            "sink_frames": 1,
            "latent_frames_per_chunk": 1,
            "sink_refresh_threshold": 0.9,
        },
        8 * 2,
        0,
        CHUNKS,
    ),
    "noise-matched": (
        {"window_frames": 6, "sink_frames": 0, "cache": "noise_matched"},
        3 * 4,
        1,
        8,
    ),
    "spare frames": (
        {
            "window_frames": 6,
            "sink_frames": 0,
            "cache": "noise_matched",
            "serving": {"chunks_in_flight": 3},
        },
        6 * 3 + 3,
        2,
        CHUNKS,
    ),
}
"""For each test case:

- the options;
- the number of graphs per stream: the number of ring positions (while the ring is filling and
  afterwards) times the number of kinds of passes;
- the number of graphs that the first stream does not capture, because it runs their passes only
  once;
- the number of chunks after which a stream has reached every ring position at least twice since
  its ring became full.
"""
each_option = pytest.mark.parametrize(
    ("options", "graphs", "once", "chunks"), OPTIONS.values(), ids=OPTIONS.keys()
)


def each_kv_dtype(*nightly: str) -> pytest.MarkDecorator:
    """Parametrize a test over K/V dtypes.

    Args:
        nightly: Dtypes tested only nightly, because another test checks them at every commit.
    """
    dtypes = {"plain K/V": None, "FP8 K/V": torch.float8_e4m3fn}
    marks = {name: [pytest.mark.nightly] for name in nightly}
    params = [
        pytest.param(dtype, id=name, marks=marks.get(name, [])) for name, dtype in dtypes.items()
    ]
    return pytest.mark.parametrize("kv_dtype", params)


@each_kv_dtype("FP8 K/V")
@each_option
def test_a_stream_with_graphs_equals_the_stream(
    causal_wan: Path,
    options: dict[str, Any],
    graphs: int,
    once: int,
    chunks: int,
    kv_dtype: torch.dtype | None,
) -> None:
    """Two concurrent streams that use graphs are bit-identical to the same streams without
    graphs.
    """
    expected = stream(load_model(causal_wan, kv_dtype=kv_dtype, **options), chunks)
    model = load_model(causal_wan, kv_dtype=kv_dtype, **options)
    model.transformer.graphs = ForwardGraphs(capture=hold)
    sessions = [open_session(model, name, output="latents") for name in ("one", "two")]
    for want in expected:
        for session in sessions:
            got = run_chunk(model, session, prompt="a beach", output="latents")[1]["latents"]
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(model.transformer.graphs) == 2 * graphs - once


@each_kv_dtype("plain K/V")
@each_option
def test_a_later_stream_reuses_the_graphs_of_an_earlier_one(
    causal_wan: Path,
    options: dict[str, Any],
    graphs: int,
    once: int,
    chunks: int,
    kv_dtype: torch.dtype | None,
) -> None:
    """A later stream with another prompt and seed reuses a closed stream's memory and replays that
    stream's graphs from the first pass on. NaNs left in that memory have no effect.
    """
    expected = stream(
        load_model(causal_wan, kv_dtype=kv_dtype, **options), chunks, prompt="a forest", seed=3
    )
    model = load_model(causal_wan, kv_dtype=kv_dtype, **options)
    captured = model.transformer.graphs = ForwardGraphs(capture=hold)
    session = open_session(model, output="latents")
    for _ in range(chunks):
        run_chunk(model, session, prompt="a beach", output="latents")
    session.close()
    later = open_session(model, output="latents", prompt="a forest")
    for window in later.window.windows:
        for position in window.buffers:
            position.copy_(torch.full_like(position, torch.nan, dtype=torch.float32))
    for want in expected:
        got = run_chunk(model, later, prompt="a forest", seed=3, output="latents")[1]["latents"]
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(captured) == graphs, "only the passes that ran once before are captured now"
    assert len(captured.pool) == 0
    later.close()
    assert len(captured.pool) == len(later.window.windows)


def test_a_fork_uses_graphs_of_its_own_memory(causal_wan: Path) -> None:
    """A fork replays graphs that read the fork's own memory and prompt. One of the forks reuses a
    closed stream's memory.
    """
    ends = []
    for by_graphs in (False, True):
        model = load_model(causal_wan, window_frames=6, sink_frames=0)
        model.transformer.graphs = ForwardGraphs(capture=hold) if by_graphs else None
        ended, source = (
            open_session(model, name, output="latents") for name in ("ended", "source")
        )
        for session in (ended, source):
            for _ in range(5):
                run_chunk(model, session, prompt="a beach", output="latents")
        ended.close()
        forks = [source.fork("one"), source.fork("two")]
        ends.append(
            [
                run_chunk(model, session, prompt=prompt, output="latents")[1]["latents"]
                for _ in range(4)
                for session, prompt in zip(
                    (source, *forks), ("a beach", "a forest", "a river"), strict=True
                )
            ]
        )
    for want, got in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)
def test_an_adapter_in_the_slot_of_another_reuses_its_graphs(
    causal_wan: Path, tmp_path: Path, device: str
) -> None:
    """An adapter with the same modules and rank reuses the graphs captured for the previous adapter
    in its slot. An adapter of a different rank requires new graphs.
    """
    ranks = {"ink": 4, "wool": 4, "silk": 2}
    paths = {
        name: files.write_causal_wan(causal_wan, tmp_path / f"{name}.safetensors", seed, rank)
        for seed, (name, rank) in enumerate(ranks.items())
    }
    latents, counts = [], []
    for by_graphs in (False, True):
        with torch.device(device):
            model = load_model(causal_wan, window_frames=6, sink_frames=0, cuda_graphs=by_graphs)
        store = make_store(model, paths, max_loras=1, device=device)
        if by_graphs and device == "cpu":
            model.transformer.graphs = ForwardGraphs(capture=hold)
        session, made = open_session(model, output="latents"), []
        for name in ("ink", "wool", "ink", "silk"):
            with store.applied(store.select([Lora(name=name)])):
                made += [
                    run_chunk(model, session, prompt="a beach", output="latents")[1]["latents"]
                    for _ in range(6)
                ]
            counts.append(len(model.transformer.graphs or ()))
        latents.append(made)
    for want, got in zip(*latents, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert counts[:7] == [0] * 4 + [3 * 2] * 3 and counts[7] > counts[6]


@pytest.mark.cuda
@needs_cuda
def test_cuda_graphs_equal_plain_launches(causal_wan: Path) -> None:
    """From its first pass on, a second stream replays the first stream's graphs."""
    options = {"window_frames": 9, "sink_frames": 3}
    with torch.device("cuda"):
        plain, by_graphs = (
            load_model(causal_wan, **options),
            load_model(causal_wan, **options, cuda_graphs=True),
        )
    assert by_graphs.transformer.graphs is not None
    for prompt in ("a beach", "a forest", "a beach"):
        session = open_session(by_graphs, output="latents", prompt=prompt)
        for want in stream(plain, CHUNKS, prompt=prompt):
            got = run_chunk(by_graphs, session, prompt=prompt, output="latents")[1]["latents"]
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        session.close()
        assert len(by_graphs.transformer.graphs) == 4 * 2
