# SPDX-License-Identifier: Apache-2.0
"""How the three engines of a Qwen2.5-Omni are started; the engines are pretended."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.waits import seconds
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.model_executor.models.qwen2_5_omni import stages
from vllm_omni.model_executor.models.qwen2_5_omni.stages import SpeechEngines


class Starts:
    """Stands for `AsyncLLM.from_engine_args`; at the CPU's turn all three meet inside."""

    def __init__(self, together: int, fails: int | None = None) -> None:
        self.barrier = threading.Barrier(together, timeout=seconds(20))
        self.fails = fails
        self.shares: list[float] = []
        self.at_work = self.most_at_work = 0
        self.stopped = 0

    def __call__(self, args: Any) -> Any:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        self.barrier.wait()
        self.at_work -= 1
        self.shares.append(args.gpu_memory_utilization)
        if len(self.shares) == self.fails:
            raise RuntimeError("no room")
        engine: Any = object.__new__(AsyncLLM)
        engine.shutdown = self._stop
        return engine

    def _stop(self) -> None:
        self.stopped += 1


def start(path: Path, starts: Starts, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.current_platform, "is_cpu", lambda: on_cpu)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", starts)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None)
    monkeypatch.setattr(stages, "SpeechComposition", lambda *started, **_: started)
    asyncio.run(SpeechEngines.start_engines(path))


def test_on_a_cpu_engines_start_side_by_side(
    qwen2_5_omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(together=3)
    start(qwen2_5_omni, starts, True, monkeypatch)
    assert starts.most_at_work == 3


def test_on_a_gpu_they_start_in_turn_and_fit_together(
    qwen2_5_omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measures the memory it may take while nobody else takes any; their shares leave a
    tenth to the rest.
    """
    starts = Starts(together=1)
    start(qwen2_5_omni, starts, False, monkeypatch)
    assert starts.most_at_work == 1
    assert starts.shares == [0.65, 0.15, 0.1]


@pytest.mark.parametrize(("on_cpu", "stopped"), [(True, 2), (False, 1)])
def test_one_that_does_not_start_stops_the_others(
    qwen2_5_omni: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, stopped: int
) -> None:
    starts = Starts(together=3 if on_cpu else 1, fails=2)
    with pytest.raises(RuntimeError, match="no room"):
        start(qwen2_5_omni, starts, on_cpu, monkeypatch)
    assert starts.stopped == stopped
