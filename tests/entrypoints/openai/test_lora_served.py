# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a real server: vLLM's flags and routes, and adapters selected per chunk through
the endpoints.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import lora_files as files
from helpers.live_clients import GenerateClient
from helpers.openai_server import KEY, Served, serve
from helpers.waits import seconds, wait_until
from safetensors.torch import save_file
from torch import zeros

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

SIZE = (48, 32)
INK = [{"name": "ink", "scale": 2.0}]


@pytest.fixture(scope="module")
def adapters(causal_wan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    save_file({"other.block.lora_A.weight": zeros(2, 2)}, folder / "foreign.safetensors")
    made = {
        name: files.write_causal_wan(causal_wan, folder / f"{name}.safetensors", seed)
        for seed, name in enumerate(("ink", "wool"))
    }
    return {**made, "foreign": folder / "foreign.safetensors"}


@pytest.fixture(scope="module")
def server(
    causal_wan: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield from serve(
        causal_wan,
        tmp_path_factory.mktemp("lora_server") / "server.log",
        [
            "--enable-lora",
            "--max-loras",
            "2",
            "--max-lora-rank",
            "8",
            "--lora-modules",
            f"ink={adapters['ink']}",
        ],
        {"height": SIZE[1], "width": SIZE[0], "model": {"window_frames": 7, "sink_frames": 2}},
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
    )


def post(server: Served, path: str, body: dict[str, Any]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds(60)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chunks(
    server: Served, count: int, events: dict[int, Any] | None = None, **fields: Any
) -> list[np.ndarray]:
    """Return the frames of a stream generated from text.

    Args:
        events: Adapters to send, keyed by the number of chunks that the client receives before it
            sends them.
    """
    seen = []
    with GenerateClient(
        server.port, additional_headers={"Authorization": f"Bearer {KEY}"}
    ) as client:
        client.init(first_frame=None, seed=3, max_chunks=count, **fields)
        for index in range(count):
            seen.append(client.chunk(60).frames())
            if events and index + 1 in events:
                client.event("lora", events[index + 1])
    return seen


def equal(got: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def test_adapters_through_the_endpoints_and_vllms_routes(
    server: Served, adapters: dict[str, Path]
) -> None:
    """Adapters are listed, selected at the start of a stream or during it, and loaded while the
    server runs. Loading another model's adapter file fails and has no effect.
    """
    assert [model.id for model in server.client.models.list()] == ["null", "ink"]
    plain = chunks(server, 3)
    ink = chunks(server, 3, lora=INK)
    assert not np.array_equal(ink[0], plain[0]) and equal(chunks(server, 3, lora=INK), ink)
    switched = chunks(server, 12, {1: INK})
    assert np.array_equal(switched[0], plain[0]) and not equal(switched[:12], chunks(server, 12))

    status, text = post(
        server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(adapters["foreign"])}
    )
    assert status == 400 and "tensors for modules that this model lacks" in text
    status, text = post(
        server, "/v1/load_lora_adapter", {"lora_name": "wool", "lora_path": str(adapters["wool"])}
    )
    assert status == 200, text
    assert [model.id for model in server.client.models.list()] == ["null", "ink", "wool"]
    both = chunks(server, 2, lora=[*INK, {"name": "wool"}])
    assert not np.array_equal(both[0], ink[0])
    assert equal(chunks(server, 3), plain)


def test_a_video_with_adapters(server: Served) -> None:
    """A client of the OpenAI route selects adapters in a form field. An unknown adapter name fails
    only the job that uses it.
    """

    def made(**fields: Any) -> Any:
        extra = {"seed": 1, "num_frames": 9, **fields}
        job = server.client.videos.create(prompt="a field", extra_body=extra)
        wait_until(
            lambda: server.client.videos.retrieve(job.id).status in ("completed", "failed"), 60
        )
        return server.client.videos.retrieve(job.id)

    files_of = [
        server.client.videos.download_content(made(**fields).id).content
        for fields in ({}, {"lora": json.dumps(INK)}, {})
    ]
    assert files_of[0] == files_of[2] != files_of[1]
    failed = made(lora=json.dumps([{"name": "nowhere"}]))
    assert failed.status == "failed" and "no adapter 'nowhere'" in failed.error.message
    status, text = post(
        server, "/v1/videos", {"prompt": "a", "lora": [{"name": "ink", "scale": "much"}]}
    )
    assert status == 400 and "lora" in text
