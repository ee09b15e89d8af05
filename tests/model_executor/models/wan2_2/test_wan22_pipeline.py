# SPDX-License-Identifier: Apache-2.0
"""Tests of `Wan22` without an engine: step batching, experts and requests."""

from pathlib import Path
from typing import Any

import pytest
from helpers.wan22_driver import load_model, make_video, picture, start, step

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution
from vllm_omni.model_executor.models.wan2_2.config import Wan22Checkpoint, Wan22Options
from vllm_omni.model_executor.models.wan2_2.family import FAMILY
from vllm_omni.model_executor.models.wan2_2.request import read_request
from vllm_omni.model_executor.models.wan2_2.weights import load_transformer
from vllm_omni.outputs import RequestFailed

BATCH = 1e-4
"""Tolerance for batched matrix products, which sum in a different order from unbatched products.
The measured difference is 2e-5 over eight steps.
"""
A14B = Wan22Checkpoint("t2v", 0.875, 16, 8, 4)


def test_requests_at_different_steps_share_a_forward(checkpoints: dict[str, Path]) -> None:
    """Requests that share forward passes produce the same latents as when each runs alone, even if
    one starts two steps later with a different guidance, prompt and schedule length.
    """
    model = load_model(checkpoints["t2v"])
    assert isinstance(model, SupportsStepExecution)
    wanted: list[dict[str, Any]] = [
        {"seed": 1, "num_inference_steps": 8, "output": "latents"},
        {
            "seed": 2,
            "num_inference_steps": 8,
            "guidance_scale": 1.0,
            "prompt": "a river",
            "output": "latents",
        },
    ]
    alone = [make_video(model, **fields)[1]["latents"] for fields in wanted]
    first, second = (start(model, **fields) for fields in wanted)
    step(model, [first])
    step(model, [first])
    shared = 0
    while second.step < second.num_steps:
        batch = [request for request in (first, second) if request.step < request.num_steps]
        if len({model.batch_key(request) for request in batch}) == 1:
            shared += len(batch) == 2
            step(model, batch)
        else:
            for request in batch:
                step(model, [request])
    assert shared >= 4
    for request, expected in zip((first, second), alone, strict=True):
        assert (model.latents(request) - expected).abs().max() < BATCH


def test_guidance_defaults_are_the_authors(checkpoints: dict[str, Path]) -> None:
    """Guidance defaults to 4 above the boundary and 3 below it, as the model's authors recommend.
    If a request specifies only `guidance_scale`, that scale applies on both sides of the boundary.
    The deployment's defaults take precedence over the authors' values.
    """

    def guidance(options: dict[str, Any] | None = None, **params: Any) -> tuple[float, float]:
        sent = DiffusionParams(session_id="a", one_shot=True, prompt="a", **params)
        request = read_request(sent, A14B, Wan22Options.parse(options or {}), OmniConfig())
        return request.guidance, request.guidance_2

    assert guidance() == (4.0, 3.0) == guidance(guidance_scale=4.0)
    assert guidance(guidance_scale=6.0) == (6.0, 6.0)
    assert guidance({"defaults": {"guidance_scale_2": 2.0}}) == (4.0, 2.0)
    assert guidance({"defaults": {"guidance_scale": 5.0}}) == (5.0, 5.0)
    assert guidance({"defaults": {"guidance_scale": 5.0, "guidance_scale_2": 1.5}}) == (5.0, 1.5)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"one_shot": False}, "invalid_request", "send one_shot"),
        ({"num_images": 2}, "invalid_request", "one video per request"),
        ({"prompt": ""}, "invalid_request", "prompt must not be empty"),
        ({"prompt": None}, "invalid_request", "prompt must not be empty"),
        ({"actions": [["w"]]}, "invalid_request", "no camera"),
        ({"num_frames": 8}, "unsupported_size", r"1 \+ a multiple of 4, got 8; try 5"),
        ({"num_frames": 125}, "invalid_request", "more than 121"),
        ({"height": 472}, "unsupported_size", "multiples of 16"),
        ({"height": 960}, "unsupported_size", "at most"),
        ({"num_inference_steps": 201}, "invalid_request", "more than 200"),
        (
            {"options": {"guidance": 2}},
            "invalid_request",
            "allowed keys: guidance_scale_2, flow_shift",
        ),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    fields: dict[str, Any], code: str, words: str
) -> None:
    params = DiffusionParams(**{"session_id": "a", "one_shot": True, "prompt": "a", **fields})
    with pytest.raises(RequestFailed, match=words) as failure:
        read_request(params, A14B, Wan22Options(), OmniConfig())
    assert failure.value.code == code


def test_images_are_checked(checkpoints: dict[str, Path]) -> None:
    """An i2v model requires a start image, a t2v model refuses one, and a start image must have the
    video's size.
    """
    with pytest.raises(RequestFailed, match="send the tensor 'image'"):
        start(load_model(checkpoints["i2v"]))
    with pytest.raises(RequestFailed, match="no tensors"):
        start(load_model(checkpoints["t2v"]), {"image": picture()})
    with pytest.raises(RequestFailed, match="the video's size"):
        start(load_model(checkpoints["ti2v"]), {"image": picture()[:32]})


@pytest.mark.parametrize(("layout", "clean_frames"), [("t2v", [0]), ("i2v", [0]), ("ti2v", [0, 1])])
def test_the_warm_up_covers_every_kind_of_request(
    checkpoints: dict[str, Path], layout: str, clean_frames: list[int]
) -> None:
    """The TI2V warm-up runs requests with and without an image, because the two kinds of requests
    are compiled separately.
    """
    model = load_model(checkpoints[layout])
    requests = [
        DiffusionRequest("warm-up", params, dict(tensors), model.new_session(params))
        for params, tensors in model.warmup_inputs()
    ]
    for request in requests:
        model.prepare_encode(request)
        step(model, [request])
    assert [request.state.clean_frames for request in requests] == clean_frames
    assert len({request.session.session_id for request in requests}) == len(requests)


def test_kind_tasks_and_defaults_are_read_from_the_directory(checkpoints: dict[str, Path]) -> None:
    """The model family reads the kind, tasks and defaults from the configs in a directory and needs
    no weights.
    """
    facts = {
        layout: FAMILY.hf_config(path)["wan2_2"]["facts"] for layout, path in checkpoints.items()
    }
    assert {layout: info["kind"] for layout, info in facts.items()} == {
        layout: layout for layout in checkpoints
    }
    assert [facts[layout]["boundary_ratio"] for layout in ("t2v", "i2v", "ti2v")] == [
        0.875,
        0.9,
        None,
    ]
    assert FAMILY.capabilities is not None
    able = {
        layout: FAMILY.capabilities(FAMILY.hf_config(path), OmniConfig())
        for layout, path in checkpoints.items()
    }
    assert able["ti2v"].tasks == ("text_to_video", "image_to_video") and able["i2v"].tasks == (
        "image_to_video",
    )
    assert [able[layout].fps for layout in ("t2v", "ti2v")] == [16.0, 24.0]
    assert [able[layout].size_multiple[0] for layout in ("t2v", "ti2v")] == [16, 32]


def test_weights_are_loaded_strictly(checkpoints: dict[str, Path]) -> None:
    """Weights that do not fit are rejected, for example those of a transformer with a different
    number of input channels.
    """
    model = load_model(checkpoints["t2v"])
    with pytest.raises(ValueError, match="misshapen: 1"):
        load_transformer(
            model.experts["transformer"], checkpoints["i2v"] / "transformer", model.config
        )
