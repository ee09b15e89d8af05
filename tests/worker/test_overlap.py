# SPDX-License-Identifier: Apache-2.0
"""Results that are delivered after the chunk's last step (`omni.overlap_decode`).

The tests also cover how the host paces its launches.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.results import PendingResult
from vllm_omni.worker.diffusion import pacing
from vllm_omni.worker.diffusion.decode import ResultStream
from vllm_omni.worker.diffusion.pacing import StepPacer
from vllm_omni.worker.diffusion.roles.before_vae import BeforeVAE
from vllm_omni.worker.diffusion.roles.single import SingleRank
from vllm_omni.worker.diffusion.roles.with_layers import EveryStep, LastStage

STEPS = 5


@pytest.fixture
def runner(make_runner: Any, null_world: Path) -> Any:
    return make_runner(null_world, {"overlap_decode": True})


def chunk(request_id: str, index: int, **fields: Any) -> Any:
    prompt = "a field" if index == 0 else None
    return new_request(
        request_id,
        session_id="s",
        chunk_index=index,
        prompt=prompt,
        seed=3 if index == 0 else None,
        **fields,
    )


def denoise(runner: Any, request: Any) -> Any:
    """Run all steps of a request and return the last step's output."""
    execute(runner, step(new=[request]))
    for _ in range(STEPS - 2):
        execute(runner, step(running=[request.req_id]))
    with torch.inference_mode():
        return runner.execute_model(step(running=[request.req_id]))


def test_the_chunk_is_committed_before_its_result_is_delivered(runner: Any) -> None:
    """A chunk is committed before its result is delivered.

    The chunk's last step reports the chunk as denoised, and the next step that contains the request
    returns the result.
    """
    output = denoise(runner, chunk("r", 0))
    assert output.denoised == ("r",) and output.pooler_output == [None]
    assert runner.sessions.get("s").chunk_index == 1
    meta, _ = execute(runner, step(running=["r"]))["r"]
    assert (meta["chunk_index"], meta["num_frames"]) == (0, 9)


def test_the_next_chunk_starts_in_the_step_that_delivers_the_last(
    runner: Any, make_runner: Any, null_world: Path
) -> None:
    """The next chunk starts in the step that delivers the previous chunk's result. The frames are
    the same as when chunks run one at a time.
    """
    one_by_one = make_runner(null_world, {"overlap_decode": False})
    expected = [run_to_end(one_by_one, chunk(name, index))[name] for index, name in enumerate("ab")]
    denoise(runner, chunk("a", 0))
    both = execute(runner, step(running=["a"], new=[chunk("b", 1)]))
    assert both["b"] is None and runner.request_progress()["s"] == [1, STEPS]
    results = [both["a"]]
    execute(runner, step(finished=["a"], running=["b"]))
    for _ in range(STEPS - 2):
        execute(runner, step(running=["b"]))
    results.append(execute(runner, step(running=["b"]))["b"])
    for (meta, tensors), (expected_meta, expected_tensors) in zip(results, expected, strict=True):
        assert torch.equal(tensors["frames"], expected_tensors["frames"])
        assert {**meta, "timings_ms": 0} == {**expected_meta, "timings_ms": 0}


def test_aborting_a_pending_result_keeps_the_chunk(runner: Any) -> None:
    """If a request with a pending result is aborted, its chunk stays part of the session.

    The client can therefore continue with the next chunk.
    """
    denoise(runner, chunk("r", 0))
    execute(runner, step(finished=["r"]))
    assert runner.sessions.get("s").chunk_index == 1 and not runner.sessions.is_pinned("s")
    assert run_to_end(runner, chunk("next", 1))["next"][0]["chunk_index"] == 1


def test_the_stock_scheduler_receives_results_immediately(
    make_runner: Any, null_world: Path
) -> None:
    """The stock scheduler receives a result immediately, because it would not schedule the request
    again.
    """
    runner = make_runner(
        null_world, {"overlap_decode": True}, "vllm.v1.core.sched.scheduler.Scheduler"
    )
    assert execute(runner, step(new=[chunk("r", 0)]))["r"][0]["chunk_index"] == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_decode_overlaps_later_work() -> None:
    """Work launched after a decode neither delays copying the result to the host nor changes the
    decode's inputs.
    """

    class Slow:
        def post_decode(self, request: Any) -> Any:
            torch.cuda._sleep(20_000_000)
            return {}, {"x": request.state * 2}

    class Session:
        session_id, chunk_index = "s", 0

    from vllm_omni.model_executor.interfaces import DiffusionRequest
    from vllm_omni.outputs import unpack

    device = torch.device("cuda")
    stream = ResultStream(device, overlap=True)
    request = DiffusionRequest(
        "r", None, {}, Session(), state=torch.full((1 << 20,), 3.0, device=device)
    )  # type: ignore[arg-type]
    (result,) = stream.launch([request], [0.0], lambda: [Slow().post_decode(request)])
    torch.cuda._sleep(2_000_000_000)
    _, tensors = unpack(result.envelope())
    assert not torch.cuda.current_stream().query()
    assert bool((tensors["x"] == 6).all())


class Device:
    """A mock of CUDA events on a device that computes for `step_ms` before each event.

    The mock clock advances only when the host sleeps or waits.
    """

    def __init__(self, step_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step_s = step_ms / 1e3
        self.now_s = 0.0
        self.ends_s: list[float] = []
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(pacing, "time", self)

    @property
    def launched(self) -> int:
        return len(self.ends_s)

    @property
    def ended(self) -> int:
        return sum(end_s <= self.now_s for end_s in self.ends_s)

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def event(self, enable_timing: bool) -> "Device.Event":
        assert enable_timing
        return Device.Event(self)

    class Event:
        def __init__(self, device: "Device") -> None:
            self.device = device

        def record(self) -> None:
            device = self.device
            device.ends_s.append(max([device.now_s, *device.ends_s[-1:]]) + device.step_s)
            self.end_s = device.ends_s[-1]

        def synchronize(self) -> None:
            self.device.now_s = max(self.device.now_s, self.end_s)

        def query(self) -> bool:
            return self.end_s <= self.device.now_s

        def elapsed_time(self, end: "Device.Event") -> float:
            assert end.query(), "a time that is not known yet"
            return (end.end_s - self.end_s) * 1e3


@pytest.mark.parametrize(
    ("step_ms", "stages", "hurry", "before_end_ms"),
    [
        (10.0, False, False, 10.0),
        (51.0, False, False, 10.0),
        (60.0, False, False, 10.0),
        (60.0, False, True, 60.0),
        (60.0, True, False, 60.0),
        (200.0, True, False, 30.0),
    ],
)
def test_the_host_launches_a_step_ahead_and_later_for_long_steps(
    monkeypatch: pytest.MonkeyPatch, step_ms: float, stages: bool, hurry: bool, before_end_ms: float
) -> None:
    """The host launches each step while the previous one is running. It launches later if steps are
    long, but the device never idles.

    `before_end_ms` is the time between the launch of the next step and the end of the current one.
    """
    device = Device(step_ms, monkeypatch)
    pacer = StepPacer(torch.device("cuda"), stages=stages)
    for _ in range(6):
        pacer.launched()
        assert pacer.wait(lambda: hurry) == (hurry and device.launched > 2)
    assert device.ends_s[-1] == pytest.approx(6 * step_ms / 1e3)
    assert device.ends_s[-1] - device.now_s == pytest.approx(before_end_ms / 1e3, abs=1e-6)


def test_a_slow_launch_counts_from_the_start_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a step's launch is slow, the step's expected end is computed from its start.

    The device starts the step while the host is still launching it.
    """
    device = Device(0.0, monkeypatch)
    pacer = StepPacer(torch.device("cuda"))
    for _ in range(8):
        device.step_s = 0.06  # the device is busy for this duration, counted from the first kernel
        pacer.launching()
        device.sleep(0.04)
        device.step_s = 0.0
        pacer.launched()
        pacer.wait()
    assert device.ends_s[-1] - device.now_s == pytest.approx(0.01, abs=1e-6)


def test_the_host_stops_waiting_when_a_step_ends_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a step ends early, the host stops waiting. The end of the next step is then predicted from
    its launch time.
    """
    device = Device(200.0, monkeypatch)
    pacer = StepPacer(torch.device("cuda"))
    for step_s in (0.2, 0.2, 0.2, 0.07):
        device.step_s = step_s
        pacer.launched()
        pacer.wait()
    assert device.ends_s[-1] <= device.now_s < device.ends_s[-1] + 0.002
    device.step_s = 0.2
    pacer.launched()
    pacer.wait()
    assert device.ends_s[-1] - device.now_s == pytest.approx(0.2 - (0.07 - 0.01), abs=2e-3)


@pytest.mark.parametrize("launch_s", [0.0, 0.03])
def test_a_long_step_does_not_delay_later_launches(
    monkeypatch: pytest.MonkeyPatch, launch_s: float
) -> None:
    """After a long step, later steps are still launched between 10 and 40 ms ahead, even if the
    host notices late that a step has ended.

    Examples of long steps are a chunk's first step, which also encodes, and its last step, which
    shares the device with a decode.
    """
    device = Device(0.0, monkeypatch)
    pacer, leads = StepPacer(torch.device("cuda")), []
    for _ in range(3):
        for step_s in (0.1, 0.075, 0.075, 0.075, 0.1):
            device.step_s = step_s
            pacer.launching()
            device.sleep(launch_s)
            device.step_s = 0.0
            pacer.launched()
            pacer.wait()
            leads.append(device.ends_s[-1] - device.now_s)
        before_s = device.now_s
        pacer.launched(moves=False)
        pacer.wait()
        assert device.now_s == before_s, "a step that only fetches results is not waited for"
    assert min(leads[-5:]) == pytest.approx(0.01, abs=2e-3)
    assert max(leads[-5:]) < 0.04


def test_the_device_time_of_a_step_is_reported_with_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's device time is reported with a later step, because it can be measured only once the
    step has ended.
    """
    device = Device(0.0, monkeypatch)
    pacer, reported = StepPacer(torch.device("cuda")), []
    for number in range(4):
        device.step_s = 0.01 * (number + 1)
        pacer.launching()
        pacer.launched()
        pacer.wait()
        reported.append((pacer.before_s, pacer.unfinished))
    assert reported == [
        (None, True),
        (None, True),
        (pytest.approx(0.02), True),
        (pytest.approx(0.03), True),
    ]
    device.sleep(1.0)
    assert not pacer.unfinished


def test_the_pacer_does_nothing_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without CUDA, the pacer creates no events and does not wait."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options))
    pacer = StepPacer(torch.device("cpu"))
    for _ in range(6):
        pacer.launching()
        pacer.launched()
        pacer.wait()
    assert made == [] and pacer.before_s is None and not pacer.unfinished


@pytest.fixture
def slow_device(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device with 200 ms steps on the last of several stages. The runner itself computes on the
    CPU.
    """
    if torch.cuda.is_available():
        pytest.skip("the device is mocked")
    device = Device(200.0, monkeypatch)
    parts = replace(runner.parts, pacer=StepPacer(torch.device("cuda"), stages=True))
    monkeypatch.setattr(runner, "role", LastStage(parts, EveryStep(runner.model, ends_steps=True)))
    return device


def test_a_result_that_arrives_during_the_wait_is_returned_immediately(
    runner: Any, slow_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that arrives while the host waits for the device is returned with the step that
    ended its chunk, and is not reported as pending.
    """
    came_s = 4.5 * slow_device.step_s
    monkeypatch.setattr(PendingResult, "ready", lambda _: slow_device.now_s >= came_s)
    output = denoise(runner, chunk("a", 0))
    assert (
        output.pooler_output[0] is not None and output.denoised == () and output.committed == ("a",)
    )
    assert slow_device.now_s == pytest.approx(came_s, abs=2e-3)
    assert execute(runner, step(finished=["a"], new=[chunk("b", 1)]))["b"] is None


def test_a_result_without_room_does_not_delay_its_session(
    runner: Any, slow_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a result does not fit in the message, its chunk is reported as denoised, so the session's
    next chunk can start.
    """
    monkeypatch.setattr("vllm_omni.worker.diffusion.decode._MAX_STEP_BYTES", 1024)
    requests = [new_request(name, session_id=name, prompt="a field", seed=3) for name in "ab"]
    execute(runner, step(new=requests))
    for _ in range(STEPS - 2):
        execute(runner, step(running=["a", "b"]))
    with torch.inference_mode():
        output = runner.execute_model(step(running=["a", "b"]))
    assert output.pooler_output[0] is not None and output.pooler_output[1] is None
    assert output.denoised == ("b",)
    assert execute(runner, step(finished=["a"], running=["b"]))["b"] is not None


def test_a_ready_result_shortens_the_wait_for_the_device(
    runner: Any, slow_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a result is ready, the host shortens its wait for the device, because the client would
    otherwise receive the result a step later.
    """
    device = slow_device
    monkeypatch.setattr(PendingResult, "ready", lambda _: False)
    denoise(runner, chunk("a", 0))
    assert device.ended == device.launched - 1 == STEPS - 1
    outcome = execute(runner, step(running=["a"], new=[chunk("b", 1)]))
    assert outcome["a"] is not None and outcome["b"] is None
    assert device.launched == STEPS + 1 and device.ended == STEPS
    assert device.ends_s[-1] - device.now_s == pytest.approx(device.step_s)
    execute(runner, step(finished=["a"], running=["b"]))
    assert device.launched == STEPS + 2 and device.ended == STEPS + 1
    assert device.ends_s[-1] - device.now_s < device.step_s / 4


@pytest.mark.parametrize("index", [0, 1])
def test_the_last_passes_of_a_chunk_are_launched_without_waiting(
    index: int, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches the clean-context pass during the last denoise step, because it delivers
    the frames only after the launch. In a session's first chunk, whose passes are short, it also
    launches the last denoise step during the step before.
    """
    if torch.cuda.is_available():
        pytest.skip("the device is mocked")
    device = Device(200.0, monkeypatch)
    parts = replace(runner.parts, pacer=StepPacer(torch.device("cuda")))
    monkeypatch.setattr(runner, "role", SingleRank(parts))
    clean = {"steps": STEPS, "clean_pass": True}
    first, second = (
        new_request(name, session_id=session, prompt="a field", seed=3, options=clean)
        for name, session in (("first", "s"), ("a", "t"))
    )
    run_to_end(runner, first)  # the pacer knows the duration of a step now
    left_s = []
    execute(runner, step(new=[chunk("a", 1, options=clean) if index else second]))
    for _ in range(STEPS - 2):
        left_s.append(device.ends_s[-1] - device.now_s)
        execute(runner, step(running=["a"]))
    assert device.ends_s[-1] - device.now_s >= device.step_s
    *others, before_last = left_s
    if index == 0:
        assert before_last >= device.step_s
    else:
        assert before_last == pytest.approx(0.01, abs=2e-3)
    assert others == pytest.approx([0.01] * len(others), abs=2e-3), "launched 10 ms ahead"
    assert execute(runner, step(running=["a"]))["a"] is not None


def test_a_stage_before_the_vae_waits_before_its_step(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank in front of the VAE stage waits for the device before each step.

    The rank does not wait in a step that only fetches results.
    """
    calls: list[str] = []

    class Pacer:
        before_s, unfinished = None, False

        def launching(self) -> None:
            """Do nothing."""

        def wait(self, may_continue: Callable[[], bool] = lambda: False) -> bool:
            calls.append("wait")
            return False

        def launched(self, *, moves: bool = True) -> None:
            calls.append("launched")

    class Alone(BeforeVAE):
        """A role that has no VAE stage to send to. Its micro-step only records the call."""

        def __init__(self, parts: Any) -> None:
            super().__init__(parts, EveryStep(parts.model, ends_steps=True))

        def micro_step(self, states: Any, received: Any, outputs: Any) -> IntermediateTensors:
            calls.append("step")
            return IntermediateTensors({})

    parts, computes, done = (
        replace(runner.parts, pacer=Pacer()),
        SimpleNamespace(done=False),
        SimpleNamespace(done=True),
    )
    role = Alone(parts)
    role.step([done, computes], None)  # type: ignore[list-item]
    assert calls == ["wait", "step", "launched"]
    role.step([done], None)  # type: ignore[list-item]
    assert calls == ["wait", "step", "launched", "step"]
    calls.clear()
    monkeypatch.setattr(runner, "role", SingleRank(parts))
    run_to_end(runner, chunk("s", 1))
    assert calls[:2] == ["launched", "wait"]
