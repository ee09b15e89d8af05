# SPDX-License-Identifier: Apache-2.0
"""Streams start from an image or continue from given latents (Self-Forcing's continuation)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import (
    HEIGHT,
    WIDTH,
    load_model,
    make_request,
    open_session,
    run_chunk,
    stream,
)
from helpers.chunks import step
from helpers.golden import golden_folder
from safetensors.torch import load_file

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan import pipeline
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import (
    find_layout,
    hf_config,
    open_transformer,
)
from vllm_omni.model_executor.models.causal_wan.checkpoint.weights import load_transformer
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan, StreamSetup
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.model_executor.models.wan.images.files import prepare_image
from vllm_omni.outputs import RequestFailed

GOLDEN = golden_folder("wan_causal")
LATENTS = {"output": "latents"}


@pytest.fixture(scope="module")
def model(causal_wan: Path) -> CausalWan:
    return load_model(causal_wan, window_frames=9, sink_frames=3)


def start_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (HEIGHT, WIDTH, 3), dtype=torch.uint8, generator=generator)


# -- against the recording -------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedNoise:
    """Replays Self-Forcing's sequential random samples by chunk and step.

    The first `given` chunks have no random samples.
    """

    recorded: Mapping[str, torch.Tensor]
    given: int
    num_steps: int
    chunk: int

    def draw(self, step: int) -> torch.Tensor:
        number = self.chunk - self.given
        if step == 0:
            whole = self.recorded["noise"][0].transpose(0, 1)
            return whole[:, 3 * max(number, 0) :][:, :3].clone()
        draw = self.recorded[f"renoise{number * (self.num_steps - 1) + step - 1:02d}"]
        return (draw[0] if draw.dim() == 5 else draw).transpose(0, 1)


class RecordedPrompt(torch.nn.Module):
    def __init__(self, states_SE: torch.Tensor) -> None:
        super().__init__()
        self.states_SE = states_SE

    def encode(self, prompt: str, device: torch.device) -> torch.Tensor:
        return self.states_SE.to(device)


def test_a_stream_continues_from_given_latents_as_self_forcing_does(
    causal_wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two given chunks, three chunks generated with the recorded random samples are within
    1e-5 of Self-Forcing's latents.
    """
    recorded = load_file(GOLDEN / "sf_prefill_win6.safetensors")
    meta = json.loads((GOLDEN / "sf_meta.json").read_text())
    case = meta["cases"]["sf_prefill_win6"]
    values: dict[str, Any] = {**hf_config(causal_wan)["causal_wan"], "transformer": meta["config"]}
    values["umt5"] = {**values["umt5"], "d_model": meta["config"]["text_dim"]}
    height, width = (8 * size for size in recorded["noise"].shape[-2:])
    options = {"window_frames": case["local_attn_size"], "sink_frames": case["sink_size"]}
    omni = OmniConfig(height=height, width=width, model=options)
    model = CausalWan(
        StreamSetup.of_checkpoint(
            values, find_layout(causal_wan), omni, torch.float32, ParallelContext()
        )
    )
    load_transformer(
        model.transformer,
        open_transformer(GOLDEN / "tiny_causal_wan_state.safetensors"),
        model.config,
    )
    model.text_encoder = RecordedPrompt(recorded["prompt_embeds"][0])  # type: ignore[assignment]
    initial = recorded["initial_latent"][0].transpose(0, 1)
    given = list(initial.split(3, dim=1))

    def noise(shape: tuple[int, ...], seed: int, chunk: int, device: torch.device) -> RecordedNoise:
        return RecordedNoise(recorded, len(given), model.schedule.num_steps, chunk)

    monkeypatch.setattr(pipeline, "ChunkNoise", noise)
    session = open_session(model, **LATENTS)
    made = []
    for chunk in range(5):
        tensors = {"latents": given[chunk].contiguous()} if chunk < len(given) else {}
        made.append(run_chunk(model, session, tensors, prompt="recorded", **LATENTS)[1]["latents"])
    expected = recorded["latents"][0].transpose(0, 1)
    torch.testing.assert_close(torch.cat(made, dim=1), expected, atol=1e-5, rtol=0)
    assert torch.equal(torch.cat(made[:2], dim=1), initial)


# -- images ----------------------------------------------------------------------------------------


def test_a_stream_starts_with_its_image(model: CausalWan) -> None:
    """The start image's latent is the first frame of the stream, and the first chunk generates the
    frames after it.
    """
    image = start_image()
    session = open_session(model, **LATENTS)
    meta, tensors = run_chunk(model, session, {"image": image}, prompt="a beach", **LATENTS)
    expected, _ = model.vae.encode(prepare_image(image, HEIGHT, WIDTH), None)
    latents = tensors["latents"]
    assert (meta["num_frames"], list(latents.shape[:2])) == (9, [16, 3])
    assert torch.equal(latents[:, :1], expected[0])
    other = run_chunk(
        model,
        open_session(model, **LATENTS),
        {"image": start_image(1)},
        prompt="a beach",
        **LATENTS,
    )
    assert not torch.equal(latents[:, 1:], other[1]["latents"][:, 1:]), (
        "later frames depend on the image"
    )
    assert not torch.equal(latents[:, 1:], stream(model, 1)[0][:, 1:])


def test_the_frames_after_an_image_are_one_chunk(model: CausalWan) -> None:
    """A chunk with a start image first runs the image at timestep 0, then denoises two frames that
    attend to it, and finally runs their clean-context pass. Later chunks have the normal length.
    """
    session = open_session(model, **LATENTS)
    request = make_request(session, {"image": start_image()}, prompt="a beach", **LATENTS)
    model.prepare_encode(request)
    passes = []
    while request.step < request.num_steps:
        model.start_step(request)
        (item,) = model.items(request)
        passes.append((item.timestep, list(item.frames), item.latents.shape[1], len(item.rope[0])))
        step(model, [request])
    tokens = HEIGHT * WIDTH // 256
    denoise = [(t, [1, 2], 2, 2 * tokens) for t in model.schedule.timesteps]
    assert passes == [(0.0, [0], 1, tokens), *denoise, (0.0, [1, 2], 2, 2 * tokens)]
    model.commit(request)
    run_chunk(model, session, **LATENTS)
    assert session.chunk_index == 2 and session.window.committed_frames == 6  # type: ignore[attr-defined]


def test_an_image_gives_the_same_stream_in_a_batch_and_after_a_fork(model: CausalWan) -> None:
    """A stream with a start image produces bit-identical latents when it is batched with streams
    that have no start image, and after a fork.
    """
    alone = open_session(model, "alone", **LATENTS)
    first = run_chunk(model, alone, {"image": start_image()}, prompt="a beach", **LATENTS)[1][
        "latents"
    ]
    second = run_chunk(model, alone.fork("copy"), **LATENTS)[1]["latents"]

    sessions = [open_session(model, name, **LATENTS) for name in "ab"]
    requests = [
        make_request(sessions[0], {"image": start_image()}, prompt="a beach", **LATENTS),
        make_request(sessions[1], prompt="a beach", **LATENTS),
    ]
    for request in requests:
        model.prepare_encode(request)
    while any(request.step < request.num_steps for request in requests):
        active = [request for request in requests if request.step < request.num_steps]
        for key in {model.batch_key(request) for request in active}:
            step(model, [request for request in active if model.batch_key(request) == key])
    assert torch.equal(model.post_decode(requests[0])[1]["latents"], first)
    for request in requests:
        model.commit(request)
    assert torch.equal(run_chunk(model, sessions[0], **LATENTS)[1]["latents"], second)


def test_a_later_chunk_may_be_given_in_part(model: CausalWan) -> None:
    session = open_session(model, **LATENTS)
    run_chunk(model, session, prompt="a beach", **LATENTS)
    given = torch.zeros(16, 2, HEIGHT // 8, WIDTH // 8)
    latents = run_chunk(model, session, {"latents": given}, **LATENTS)[1]["latents"]
    assert torch.equal(latents[:, :2], given) and bool(latents[:, 2:].abs().sum() > 0)


@pytest.mark.parametrize(
    ("tensors", "first", "code"),
    [
        ({"image": torch.zeros(3, HEIGHT, WIDTH)}, True, "invalid_image"),
        ({"image": torch.zeros(0, WIDTH, 3, dtype=torch.uint8)}, True, "invalid_image"),
        ({"image": torch.zeros(1, 8193, 3, dtype=torch.uint8)}, True, "image_too_large"),
        ({"image": start_image()}, False, "invalid_request"),
        (
            {"image": start_image(), "latents": torch.zeros(16, 1, HEIGHT // 8, WIDTH // 8)},
            True,
            "invalid_request",
        ),
        ({"latents": torch.zeros(16, 4, HEIGHT // 8, WIDTH // 8)}, True, "invalid_latents"),
        ({"latents": torch.zeros(16, 1, WIDTH // 8, HEIGHT // 8)}, True, "invalid_latents"),
        (
            {"latents": torch.full((16, 1, HEIGHT // 8, WIDTH // 8), torch.nan)},
            True,
            "invalid_latents",
        ),
        (
            {"latents": torch.zeros(16, 1, HEIGHT // 8, WIDTH // 8, dtype=torch.float64)},
            True,
            "invalid_latents",
        ),
        ({"poses": torch.zeros(1)}, True, "invalid_request"),
    ],
)
def test_invalid_images_and_latents_are_refused(
    tensors: dict[str, torch.Tensor], first: bool, code: str, model: CausalWan
) -> None:
    session = open_session(model, **LATENTS)
    if not first:
        run_chunk(model, session, prompt="a beach", **LATENTS)
    with pytest.raises(RequestFailed) as refused:
        model.prepare_encode(make_request(session, tensors, prompt="a beach", **LATENTS))
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        ({"cache": "noise_matched"}, {}, "cache 'strict'"),
        ({"video_input": False}, {}, r"omni\.model\.video_input"),
        ({}, {"options": {"source": "video"}}, "repaints a video"),
    ],
)
def test_a_server_without_image_support_refuses_with_the_reason(
    options: dict[str, Any], params: dict[str, Any], message: str, causal_wan: Path
) -> None:
    """If the options of the server or of the session rule out start images, a start image is
    refused with the reason. The model announces the task `image_to_video` to `/v1/videos` only if
    the server's options allow start images.
    """
    served = load_model(causal_wan, **options)
    session = open_session(served, **params)
    with pytest.raises(RequestFailed, match=message):
        served.prepare_encode(
            make_request(session, {"image": start_image()}, prompt="a beach", **params)
        )
    family = get_family("causal_wan")
    assert family.capabilities is not None
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options)
    tasks = family.capabilities(hf_config(causal_wan), omni).tasks
    assert ("image_to_video" in tasks) == (not options)


def test_a_session_may_return_frames_and_latents(model: CausalWan) -> None:
    """The `both` output type produces the same frames and latents as separate requests for frames
    and for latents. A session's first chunk fixes the session's output type.
    """
    session = open_session(model, output="both")
    both = run_chunk(model, session, prompt="a beach", output="both")[1]
    frames = run_chunk(model, open_session(model), prompt="a beach")[1]["frames"]
    assert torch.equal(both["frames"], frames) and torch.equal(both["latents"], stream(model, 1)[0])
    with pytest.raises(RequestFailed, match="output is fixed at both"):
        model.prepare_encode(make_request(session, **LATENTS))
