# SPDX-License-Identifier: Apache-2.0
"""When several chunks of a stream are in flight in one process, they are bit-identical to chunks
that run one after another.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import (
    check_refusals,
    input_video,
    load_model,
    make_request,
    open_session,
    run_chunk,
)
from helpers.chunks import finish, step

from vllm_omni.core.step_protocol import ChunkOrder
from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    SessionState,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan
from vllm_omni.worker.diffusion.roles.temporal import StageSteps

STEPS = 3
MATCHED = {
    "cache": "noise_matched",
    "denoising_steps": [1000, 750, 500],
    "video_denoising_steps": [700, 500, 400],
}
FRAMES = {"latent_frames_per_chunk": 1, "first_chunk_latent_frames": 2}
KINDS: dict[str, dict[str, Any]] = {
    "chunks of three frames": {**MATCHED, "window_frames": 9, "sink_frames": 3},
    "sinks of two chunks": {**MATCHED, **FRAMES, "window_frames": 4, "sink_frames": 3},
    "sinks stay put": {
        **MATCHED,
        **FRAMES,
        "window_frames": 5,
        "sink_frames": 2,
        "sink_position": "absolute",
    },
    "sinks renewed": {
        **MATCHED,
        **FRAMES,
        "window_frames": 5,
        "sink_frames": 2,
        "sink_refresh_threshold": 0.999,
    },
    "FP8 keys and values": {
        **MATCHED,
        **FRAMES,
        "window_frames": 5,
        "sink_frames": 2,
        "kv_dtype": torch.float8_e4m3fn,
    },
    "global": {**MATCHED, **FRAMES, "window_frames": -1},
}
CHUNKS = 9


def chunk_params(index: int) -> dict[str, Any]:
    """Return a chunk's parameters. The prompt changes at the fifth chunk."""
    return {
        "output": "latents",
        "prompt": {0: "a beach", 4: "a town at night"}.get(index),
        "seed": None,
    }


@cache
def one_by_one(causal_wan: Path, kind: str) -> list[torch.Tensor]:
    model = load_model(causal_wan, **KINDS[kind])
    session = open_session(model, output="latents")
    return [
        run_chunk(model, session, **chunk_params(index))[1]["latents"] for index in range(CHUNKS)
    ]


class Flight:
    """A stream that starts and steps its chunks in a random order that `ChunkOrder` allows."""

    def __init__(self, model: CausalWan, session: SessionState, limit: int, seed: int = 0) -> None:
        self.model, self.session = model, session
        self.order = ChunkOrder(limit)
        self.order.lag_steps = model.lag_steps
        self.rng = random.Random(seed)
        self.in_flight: list[DiffusionRequest] = []
        self.found: dict[int, torch.Tensor] = {}
        self.most = 0

    def may_move(self, position: int) -> bool:
        steps = [request.step for request in self.in_flight]
        step = steps[position] if position < len(steps) else None
        return self.order.may_move(step, steps[:position], established=self.session.chunk_index > 0)

    def start(self) -> None:
        index = self.session.chunk_index + len(self.in_flight)
        request = make_request(self.session, **chunk_params(index))
        request.predecessor = self.in_flight[-1] if self.in_flight else None
        self.model.prepare_encode(request)
        request.predecessor = None
        self.in_flight.append(request)
        self.most = max(self.most, len(self.in_flight))

    def advance(self, chunks: int) -> None:
        """Start or step one randomly chosen chunk. If the oldest chunk is done, commit it."""
        moves: list[int] = [index for index in range(len(self.in_flight)) if self.may_move(index)]
        if (
            self.may_move(len(self.in_flight))
            and self.session.chunk_index + len(self.in_flight) < chunks
        ):
            moves.append(len(self.in_flight))
        move = self.rng.choice(moves)
        if move == len(self.in_flight):
            self.start()
            return
        request = self.in_flight[move]
        step(self.model, [request])
        if request.step == request.num_steps:
            assert move == 0
            index = self.session.chunk_index
            self.found[index] = finish(self.model, request)[1]["latents"]
            self.in_flight.pop(0)

    def run(self, chunks: int = CHUNKS) -> list[torch.Tensor]:
        while self.session.chunk_index < chunks:
            self.advance(chunks)
        return [self.found[index] for index in range(chunks)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(
        expected
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_legal_order_gives_the_same_stream(causal_wan: Path, kind: str) -> None:
    """Any legal chunk order produces the same stream. The test includes streams longer than the
    window, a prompt switch, and both fewer and more chunks in flight than steps.
    """
    expected = one_by_one(causal_wan, kind)
    for limit, seed in ((2, 0), (5, 1)):
        model = load_model(causal_wan, serving={"chunks_in_flight": limit}, **KINDS[kind])
        flight = Flight(model, open_session(model, output="latents"), limit, seed)
        assert_equal(flight.run(), expected)
        assert flight.most >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_aborted_chunks_in_flight_leave_no_trace(causal_wan: Path, kind: str) -> None:
    """If random chunks and their successors are aborted and restarted, the stream equals a stream
    without aborts. An abort does not change the session.
    """
    expected = one_by_one(causal_wan, kind)
    model = load_model(causal_wan, serving={"chunks_in_flight": 4}, **KINDS[kind])
    flight = Flight(model, open_session(model, output="latents"), 4, seed=3)
    aborted = 0
    while flight.session.chunk_index < CHUNKS:
        committed = flight.session.chunk_index
        before = {name: tensor.clone() for name, tensor in flight.session.tensors().items()}
        scalars = flight.session.scalars()
        while flight.session.chunk_index == committed and flight.rng.random() < 0.95:
            flight.advance(CHUNKS)
        if flight.session.chunk_index == committed and committed:
            tensors = flight.session.tensors()
            assert flight.session.scalars() == scalars
            assert [name for name in before if not torch.equal(before[name], tensors[name])] == []
            aborted += len(flight.in_flight)
            flight.in_flight.clear()
    assert aborted > 3
    assert_equal([flight.found[index] for index in range(CHUNKS)], expected)


def test_input_video_continues_from_the_chunk_in_flight(causal_wan: Path) -> None:
    """A chunk continues from the preceding chunk's encoder cache, last frame and noise scale, even
    if that chunk is not committed yet.
    """
    options = {**KINDS["chunks of three frames"], "window_frames": 6}

    def video(model: CausalWan, index: int) -> dict[str, Any]:
        return {"video": input_video(model.plan.pixel_frames(index), speed=1.0 + index)}

    params = {"prompt": "a sketch", "output": "latents", "options": {"source": "video"}}
    model = load_model(causal_wan, **options)
    session = open_session(model, **params)
    expected = [
        run_chunk(model, session, video(model, index), **params)[1]["latents"] for index in range(4)
    ]
    model = load_model(causal_wan, serving={"chunks_in_flight": 3}, **options)
    session = open_session(model, **params)
    assert session.nbytes == model.session_nbytes(make_request(session, **params).params)
    found = [run_chunk(model, session, video(model, 0), **params)[1]["latents"]]
    flight: list[DiffusionRequest] = []
    for index in (1, 2, 3):
        request = make_request(session, video(model, index), **params)
        request.predecessor = flight[-1] if flight else None
        model.prepare_encode(request)
        for other in reversed([*flight, request]):
            step(model, [other])
        flight.append(request)
    for position, request in enumerate(flight):
        while request.step < request.num_steps:
            step(model, [request])
        assert session.chunk_index == 1 + position
        found.append(finish(model, request)[1]["latents"])
    assert_equal(found, expected)


def test_bytes_equal_the_admitted_ones(causal_wan: Path) -> None:
    """A session allocates exactly the bytes admitted for it, including the ring slots for chunks in
    flight. A stage that runs only one denoise step allocates only that step's window.
    """
    for kind, options in KINDS.items():
        model = load_model(causal_wan, serving={"chunks_in_flight": 3}, **options)
        params = make_request(open_session(model), prompt="a beach").params
        assert model.new_session(params).nbytes == model.session_nbytes(params), kind
        windows = model.new_session(params).window.windows
        lengths = [window.buffer.shape[2] // window.tokens_per_frame for window in windows]
        if kind == "chunks of three frames":
            assert lengths == [9 + 2 * 3, 9 + 2 * 3, 9], (
                "all steps but the last need slots for chunks in flight"
            )
    stages = temporal_stages(causal_wan, KINDS["chunks of three frames"], 3)
    held = [stage.new_session(params).window.nbytes for stage in stages]
    assert len(set(held)) == 1 and held[0] < model.new_session(params).window.nbytes


# -- a stage for every step ------------------------------------------------------------------------


def temporal_stages(causal_wan: Path, options: dict[str, Any], limit: int) -> list[CausalWan]:
    serving = {"chunks_in_flight": limit, "pipeline": "temporal"}
    return [
        load_model(
            causal_wan, ParallelContext(stage=stage, num_stages=STEPS), serving=serving, **options
        )
        for stage in range(STEPS)
    ]


class Pipeline:
    """Simulates the stages of a temporal pipeline. In each tick, every chunk moves to its next
    stage. After the last stage has committed a chunk, the other stages commit it too.
    """

    def __init__(self, models: list[CausalWan]) -> None:
        self.models = models
        self.stages = [
            StageSteps(model, number, len(models)) for number, model in enumerate(models)
        ]
        self.sessions = [open_session(model, output="latents") for model in models]
        self.trips: list[list[DiffusionRequest]] = []
        """Requests of the chunks in flight, oldest chunk first. Each chunk has one request per
        stage that it has reached.
        """
        self.latents: dict[int, torch.Tensor] = {}

    def start(self, index: int) -> None:
        self.trips.append([])
        self._visit(self.trips[-1], index, None)

    def tick(self) -> None:
        for trip in self.trips:
            if len(trip) < len(self.models):
                self._visit(trip, int(trip[0].request_id), self.latents[int(trip[0].request_id)])

    def _visit(
        self, trip: list[DiffusionRequest], index: int, received: torch.Tensor | None
    ) -> None:
        stage = len(trip)
        request = make_request(self.sessions[stage], **chunk_params(index))
        request.request_id = str(index)
        before = [other[stage] for other in self.trips if len(other) > stage and other is not trip]
        request.predecessor = before[-1] if before else None
        self.models[stage].prepare_encode(request)
        self.latents[index] = self.stages[stage].run_steps([request], received)
        assert request.step == request.num_steps
        trip.append(request)

    def end(self) -> torch.Tensor:
        """Finish the oldest chunk: the last stage decodes and commits it, then the other stages
        commit it.
        """
        *earlier, last = self.trips.pop(0)
        entered = self.stages[-1].latents_for_earlier_stages(last)
        latents = finish(self.models[-1], last)[1]["latents"]
        for model, request in zip(self.models, earlier, strict=False):
            model.set_latents(request, entered)
            model.commit(request)
        return latents


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_for_every_step_gives_the_same_stream(causal_wan: Path, kind: str) -> None:
    """A pipeline with one stage per step produces the same stream as one process, even if all
    chunks in flight are aborted once.
    """
    expected = one_by_one(causal_wan, kind)
    pipeline = Pipeline(temporal_stages(causal_wan, KINDS[kind], STEPS))
    found: list[torch.Tensor] = []
    aborted_once = False
    while len(found) < CHUNKS:
        index = len(found) + len(pipeline.trips)
        pipeline.tick()
        if index < CHUNKS and (not pipeline.trips or found):
            pipeline.start(index)
        if len(found) == 5 and len(pipeline.trips) == STEPS and not aborted_once:
            pipeline.trips.clear()
            aborted_once = True
        elif pipeline.trips and len(pipeline.trips[0]) == STEPS:
            found.append(pipeline.end())
    assert aborted_once
    assert_equal(found, expected)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "serving", "num_stages", "reason"),
    [
        ({}, {"chunks_in_flight": 2}, 1, "cache 'strict' shows a chunk the clean chunk"),
        ({}, {"pipeline": "temporal"}, 4, "cache 'strict' shows"),
        (MATCHED, {"pipeline": "temporal"}, 2, "got 2; pass --pipeline-parallel-size 3"),
    ],
)
def test_unsupported_options_are_refused_with_the_reason(
    causal_wan: Path, options: dict[str, Any], serving: dict[str, Any], num_stages: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"omni\..*Causal Wan 2.1 does not support it") as refused:
        check_refusals(causal_wan, num_stages, model=options, **serving)
    assert reason in str(refused.value)
