# SPDX-License-Identifier: Apache-2.0
"""Streams whose forwards come by graph equal streams whose forwards do not, bit for bit.

On a host a "graph" repeats the forward with everything the host had decided at its capture: a key that leaves something
out shows as other latents.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import load_model, open_session, run_chunk, stream
from helpers.host_capture import hold

from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs

CHUNKS = 14


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"window_frames": 6, "sink_frames": 0}, 2 * 2),
        ({"window_frames": 9, "sink_frames": 3}, 2 * 2),
        ({"window_frames": 9, "sink_frames": 3, "sink_position": "absolute"}, 2 * 2),
        ({"window_frames": 5, "sink_frames": 1, "latent_frames_per_chunk": 1, "sink_refresh_threshold": 0.9}, 4 * 2),
        ({"window_frames": 6, "sink_frames": 0, "cache": "noise_matched"}, 2 * 4),
    ],
)
def test_a_stream_by_graphs_is_the_stream(causal_wan: Path, options: dict[str, Any], graphs: int) -> None:
    """Two streams side by side. A stream's graphs: places in the ring x kinds of pass."""
    expected = stream(load_model(causal_wan, **options), CHUNKS)
    model = load_model(causal_wan, **options)
    model.transformer.graphs = ForwardGraphs(capture=hold)
    sessions = [open_session(model, name, output="latents") for name in ("one", "two")]
    for want in expected:
        for session in sessions:
            got = run_chunk(model, session, prompt="a beach", output="latents")[1]["latents"]
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(model.transformer.graphs) == 2 * graphs


def test_a_prompt_switch_is_another_graph(causal_wan: Path) -> None:
    """Another prompt's keys and values lie elsewhere."""
    latents = []
    for by_graphs in (False, True):
        model = load_model(causal_wan, window_frames=6, sink_frames=0)
        model.transformer.graphs = ForwardGraphs(capture=hold) if by_graphs else None
        session = open_session(model, output="latents")
        prompts = ["a beach"] * 6 + ["a forest"] * 6
        latents.append([run_chunk(model, session, prompt=prompt, output="latents")[1]["latents"] for prompt in prompts])
    for want, got in zip(*latents, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_device(causal_wan: Path) -> None:
    """Real graphs, the same stream bit for bit."""
    options = {"window_frames": 9, "sink_frames": 3}
    with torch.device("cuda"):
        plain, by_graphs = load_model(causal_wan, **options), load_model(causal_wan, **options, cuda_graphs=True)
    assert by_graphs.transformer.graphs is not None
    for got, want in zip(stream(by_graphs, CHUNKS), stream(plain, CHUNKS), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(by_graphs.transformer.graphs) == 2 * 2
