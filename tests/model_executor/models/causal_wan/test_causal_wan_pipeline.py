# SPDX-License-Identifier: Apache-2.0
"""Tests of causal Wan streams driven as the runner drives them: chunks, sessions, and isolation
between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import (
    HEIGHT,
    WIDTH,
    input_video,
    load_model,
    make_request,
    open_session,
    run_chunk,
    stream,
)
from helpers.chunks import assert_same, finish, session_bits, step
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.layers.fused_ops import on_cuda
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.outputs import RequestFailed

KINDS: dict[str, dict[str, Any]] = {
    "strict": {"window_frames": 9, "sink_frames": 3},
    "strict, single frames, renewed sinks": {
        "latent_frames_per_chunk": 1,
        "window_frames": 5,
        "sink_frames": 2,
        "sink_refresh_threshold": 0.9,
    },
    "noise-matched": {
        "cache": "noise_matched",
        "latent_frames_per_chunk": 1,
        "first_chunk_latent_frames": 2,
        "window_frames": 6,
        "sink_frames": 3,
    },
    "strict, recomputed by a new prompt": {
        "window_frames": 9,
        "sink_frames": 3,
        "prompt_switch": "recompute",
    },
}


def test_fused_ops_are_called_with_positional_arguments(causal_wan: Path) -> None:
    """Models pass all arguments of fused ops by position, because the CUDA wrapper that selects a
    kernel accepts only positional arguments. Their order is that of the plain op.
    """
    expected = stream(load_model(causal_wan, **KINDS["strict"]), 2)
    model = load_model(causal_wan, **KINDS["strict"])
    chosen = FusedOps(
        **{name: on_cuda(function, function) for name, function in vars(FusedOps()).items()}
    )
    users = [module for module in model.transformer.modules() if hasattr(module, "fused_ops")]
    for module in users:
        module.fused_ops = chosen
    assert {"SelfAttention", "CrossAttention", "FeedForward", "OutputHead"} <= {
        type(module).__name__ for module in users
    }
    assert all(torch.equal(got, want) for got, want in zip(stream(model, 2), expected, strict=True))


@pytest.fixture(scope="module")
def model(causal_wan: Path) -> CausalWan:
    """Return a model with a window of 9 frames and 3 sinks. The window is full after three
    chunks.
    """
    return load_model(causal_wan, **KINDS["strict"])


@pytest.fixture(scope="module", params=KINDS)
def any_model(request: pytest.FixtureRequest, causal_wan: Path) -> CausalWan:
    return load_model(causal_wan, **KINDS[request.param])


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_runs_before_its_weights_are_fetched(causal_wan: Path, kind: str) -> None:
    models = [
        load_model(causal_wan, **KINDS[kind]),
        offloaded_out_of_reach(lambda: load_model(causal_wan, **KINDS[kind])),
    ]
    results = []
    for model in models:
        session = open_session(model, output="latents")
        _, made = run_chunk(model, session, prompt="a field", output="latents")
        results.append(made["latents"])
    assert torch.equal(*results)


# -- results ---------------------------------------------------------------------------------------


def test_a_stream_gives_9_then_12_frames(model: CausalWan) -> None:
    session = open_session(model)
    metas = []
    for _ in range(5):
        meta, tensors = run_chunk(model, session, prompt="a beach")
        metas.append((meta["first_frame"], meta["num_frames"]))
        assert tensors["frames"].shape == (meta["num_frames"], HEIGHT, WIDTH, 3)
        assert tensors["frames"].dtype == torch.uint8 and tensors["frames"].float().std() > 5
    assert metas == [(0, 9), (9, 12), (21, 12), (33, 12), (45, 12)]


def test_a_replayed_stream_is_bit_identical(any_model: CausalWan) -> None:
    for first, again in zip(stream(any_model, 6), stream(any_model, 6), strict=True):
        assert torch.equal(first, again) and bool(torch.isfinite(first).all())


@pytest.mark.parametrize("change", [{"seed": 5}, {"prompt": "a town"}])
def test_seed_and_prompt_change_the_result(model: CausalWan, change: dict[str, Any]) -> None:
    assert (stream(model, 1, **change)[0] - stream(model, 1)[0]).abs().max() > 0.05


# -- sessions --------------------------------------------------------------------------------------


def test_a_batch_of_streams_equals_streams_alone(any_model: CausalWan) -> None:
    """Two streams that share forward passes at different denoise steps produce the same latents as
    when each stream is run separately.
    """
    alone = stream(any_model, 3)
    first = open_session(any_model, "a", output="latents")
    second = open_session(any_model, "b", output="latents", prompt="a town")
    ours = []
    other = make_request(second, prompt="a town", seed=9, output="latents")
    any_model.prepare_encode(other)
    for _ in range(3):
        request = make_request(first, prompt="a beach", output="latents")
        any_model.prepare_encode(request)
        while request.step < request.num_steps:
            batch = [request]
            if other.step < other.num_steps and any_model.batch_key(other) == any_model.batch_key(
                request
            ):
                batch.append(other)
            step(any_model, batch)
            if other.step == other.num_steps:
                finish(any_model, other)
                other = make_request(second, output="latents")
                any_model.prepare_encode(other)
                step(any_model, [other])  # now at a different step than the first stream
        ours.append(finish(any_model, request)[1]["latents"])
    for x, y in zip(ours, alone, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=0)


def test_an_abandoned_chunk_leaves_no_trace(any_model: CausalWan) -> None:
    """A chunk can be abandoned at any step. The retried chunk equals the same chunk in a session
    without abandoned chunks.
    """
    session, other = open_session(any_model), open_session(any_model, "b")
    for _ in range(5):
        run_chunk(any_model, session, prompt="a beach")
        run_chunk(any_model, other, prompt="a beach")
    before = session_bits(session)
    for steps in (0, 1, 3, 99):
        request = make_request(session, prompt="a town", seed=4)
        any_model.prepare_encode(request)
        while request.step < min(steps, request.num_steps):
            step(any_model, [request])
        if steps == 99:
            any_model.post_decode(request)
        assert_same(session, before)
    again, expected = run_chunk(any_model, session), run_chunk(any_model, other)
    assert torch.equal(again[1]["frames"], expected[1]["frames"])


def test_a_fork_continues_identically_and_independently(any_model: CausalWan) -> None:
    session = open_session(any_model)
    for _ in range(4):
        run_chunk(any_model, session, prompt="a beach")
    fork = session.fork("fork")
    before = session_bits(fork)
    expected = run_chunk(any_model, session)
    assert_same(fork, before)
    assert torch.equal(run_chunk(any_model, fork)[1]["frames"], expected[1]["frames"])


def test_bytes_are_known_in_advance_and_constant(any_model: CausalWan) -> None:
    """A session never holds more bytes than were admitted for it, even after a prompt switch."""
    for source in ("text", "video"):
        params = DiffusionParams(session_id="a", prompt="a beach", options={"source": source})
        session = any_model.new_session(params)
        admitted = any_model.session_nbytes(params)
        for chunk in range(4):
            assert session.nbytes == admitted
            frames = any_model.plan.pixel_frames(chunk)
            run_chunk(
                any_model,
                session,
                {"video": input_video(frames)} if source == "video" else {},
                prompt="a town" if chunk % 2 else "a beach",
            )
        held = [*session.window.windows]  # type: ignore[attr-defined]
        total = sum(window.nbytes for window in held)
        parts = [session.decoder_cache, getattr(session.own, "encoder", None)]  # type: ignore[attr-defined]
        total += sum(part.nbytes for part in parts if part is not None) + session.cross_kv.nbytes  # type: ignore[attr-defined]
        if session.shape.keeps_latents:  # type: ignore[attr-defined]
            total += any_model.sizes.past_nbytes(session.shape)  # type: ignore[attr-defined]
        assert total <= admitted <= total + 3 * HEIGHT * WIDTH
        session.close()
        session.close()


# -- prompt switch ---------------------------------------------------------------------------------


def test_a_new_prompt_takes_effect_at_its_chunk(model: CausalWan) -> None:
    switched, base = open_session(model, "a"), open_session(model, "b")
    for _ in range(2):
        a, b = (
            run_chunk(model, switched, prompt="a beach"),
            run_chunk(model, base, prompt="a beach"),
        )
        assert torch.equal(a[1]["frames"], b[1]["frames"])
    a, b = run_chunk(model, switched, prompt="a town"), run_chunk(model, base)
    assert not torch.equal(a[1]["frames"], b[1]["frames"])
    assert switched.scalars()["prompt"] == "a town"


# -- a window computed again under a new prompt ----------------------------------------------------


def test_a_new_prompt_recomputes_the_window(causal_wan: Path) -> None:
    """As long as no frame has left the window, a stream with a recomputed window equals a stream
    that had the new prompt from the start.
    """
    model = load_model(causal_wan, **KINDS["strict, recomputed by a new prompt"])
    switched, fresh = (
        open_session(model, "a", output="both"),
        open_session(model, "b", output="both"),
    )
    for _ in range(2):
        made = run_chunk(model, switched, prompt="a beach", output="both")[1]["latents"]
        run_chunk(model, fresh, {"latents": made}, prompt="a town", output="both")
    ours, theirs = (
        run_chunk(model, session, prompt="a town", output="both") for session in (switched, fresh)
    )
    torch.testing.assert_close(ours[1]["latents"], theirs[1]["latents"], atol=1e-5, rtol=0)
    keys = {name: tensor for name, tensor in switched.tensors().items() if name.startswith("kv.")}
    assert keys
    for name, tensor in fresh.tensors().items():
        if name in keys:
            torch.testing.assert_close(keys[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("chunks", "recomputed"), [(1, 1), (2, 2), (3, 1), (6, 1)])
def test_a_chunk_with_a_new_prompt_first_recomputes_the_window(
    causal_wan: Path, chunks: int, recomputed: int
) -> None:
    """A chunk with a new prompt first runs one clean-context pass per chunk in the window. A chunk
    with the same prompt as its predecessor runs none.
    """
    model = load_model(causal_wan, **KINDS["strict, recomputed by a new prompt"])
    session = open_session(model)
    for _ in range(chunks):
        run_chunk(model, session, prompt="a beach")
    passes = []
    for prompt in ("a beach", "a town"):
        request = make_request(session, prompt=prompt)
        model.prepare_encode(request)
        passes.append(request.num_steps)
    assert passes == [5, 5 + recomputed]


@pytest.mark.parametrize("sinks", [0, 2])
def test_recomputation_does_not_see_later_slots(causal_wan: Path, sinks: int) -> None:
    """When an older chunk is recomputed, later ring buffer slots have no effect on it."""
    options = {
        **KINDS["strict, recomputed by a new prompt"],
        "latent_frames_per_chunk": 2,
        "window_frames": 8,
        "sink_frames": sinks,
    }
    model, results = load_model(causal_wan, **options), []
    for noise in (0.0, 7.0):
        session = open_session(model, "a", output="latents")
        for _ in range(7):
            run_chunk(model, session, prompt="a beach", output="latents")
        ring = slice(sinks * session.window.clean.tokens_per_frame, None)  # type: ignore[attr-defined]
        session.window.clean.buffer[:, :, ring] += noise  # type: ignore[attr-defined]
        results.append(run_chunk(model, session, prompt="a town", output="latents")[1]["latents"])
    assert torch.equal(*results) and bool(torch.isfinite(results[0]).all())


def test_recomputation_needs_the_strict_cache(causal_wan: Path) -> None:
    with pytest.raises(
        ValueError, match="prompt_switch 'recompute' needs cache 'strict', got 'noise_matched'"
    ):
        load_model(
            causal_wan, **{**KINDS["strict, recomputed by a new prompt"], "cache": "noise_matched"}
        )


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"height": 40}, "unsupported_size"),
        ({"height": 64, "width": 64}, "unsupported_size"),
        ({"prompt": ""}, "invalid_request"),
        ({"options": {"source": "radio"}}, "invalid_request"),
        ({"options": {"camera": 1}}, "invalid_request"),
    ],
)
def test_a_bad_first_chunk_opens_no_session(
    model: CausalWan, params: dict[str, Any], code: str
) -> None:
    with pytest.raises(RequestFailed) as failure:
        open_session(model, **params)
    assert failure.value.code == code


@pytest.mark.parametrize(
    ("params", "tensors", "code"),
    [
        ({"height": 64}, {}, "invalid_request"),
        ({"output": "latents"}, {}, "invalid_request"),
        ({"actions": [["w"]]}, {}, "invalid_request"),
        ({"num_inference_steps": 9}, {}, "invalid_request"),
        ({"guidance_scale": 5.0}, {}, "invalid_request"),
        ({"options": {"source": "video"}}, {}, "invalid_request"),
        ({}, {"image": torch.zeros(32, 48, 3, dtype=torch.uint8)}, "invalid_request"),
        ({}, {"video": torch.zeros(12, 32, 48, 3, dtype=torch.uint8)}, "invalid_request"),
    ],
)
def test_a_bad_later_chunk_does_not_change_the_session(
    model: CausalWan, params: dict[str, Any], tensors: dict[str, torch.Tensor], code: str
) -> None:
    session = open_session(model)
    run_chunk(model, session, prompt="a beach")
    before = session_bits(session)
    with pytest.raises(RequestFailed) as failure:
        model.prepare_encode(make_request(session, tensors, **params))
    assert failure.value.code == code
    assert_same(session, before)


def test_global_attention_ends_when_its_buffer_is_full(causal_wan: Path) -> None:
    model = load_model(causal_wan, window_frames=-1, latent_frames_per_chunk=7)
    session = open_session(model)
    for _ in range(3):
        run_chunk(model, session, prompt="a beach")
    with pytest.raises(RequestFailed, match="session_full"):
        model.prepare_encode(make_request(session))


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(model: CausalWan, field: str) -> None:
    """A request parameter that the model does not use is refused with an error that names the
    parameter.
    """
    session = open_session(model)
    with pytest.raises(RequestFailed, match=f"does not use {field}") as refused:
        model.prepare_encode(
            make_request(session, prompt="a beach", **{field: IMAGE_AND_VIDEO_PARAMS[field]})
        )
    assert refused.value.code == "invalid_request"
