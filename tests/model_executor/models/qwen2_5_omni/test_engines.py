# SPDX-License-Identifier: Apache-2.0
"""Tests of the startup of Qwen2.5-Omni's three engines, with fake engines."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.waits import seconds
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.model_executor.models.qwen2_5_omni import engines
from vllm_omni.model_executor.models.qwen2_5_omni.engines import SpeechEngines


class Starts:
    """A fake of `AsyncLLM.from_engine_args`. No start returns until `together` starts are in
    progress.
    """

    def __init__(self, together: int, fails: int | None = None) -> None:
        self.barrier = threading.Barrier(together, timeout=seconds(20))
        self.fails = fails
        self.shares: list[float] = []
        self.active = self.most_active = 0
        self.stopped = 0

    def __call__(self, args: Any) -> Any:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        self.barrier.wait()
        self.active -= 1
        self.shares.append(args.gpu_memory_utilization)
        if len(self.shares) == self.fails:
            raise RuntimeError("no room")
        engine: Any = object.__new__(AsyncLLM)
        engine.shutdown = self._stop
        return engine

    def _stop(self) -> None:
        self.stopped += 1


def start(path: Path, starts: Starts, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.current_platform, "is_cpu", lambda: on_cpu)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", starts)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None)
    monkeypatch.setattr(engines, "SpeechComposition", lambda *started, **_: started)
    asyncio.run(SpeechEngines.start_engines(path))


def test_on_a_cpu_engines_start_concurrently(
    qwen2_5_omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(together=3)
    start(qwen2_5_omni, starts, True, monkeypatch)
    assert starts.most_active == 3


def test_on_a_gpu_engines_start_one_after_another(
    qwen2_5_omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, engines start one after another, because no other engine may allocate memory while
    an engine measures free memory. The three engines' shares leave a tenth of the memory free.
    """
    starts = Starts(together=1)
    start(qwen2_5_omni, starts, False, monkeypatch)
    assert starts.most_active == 1
    assert starts.shares == [0.65, 0.15, 0.1]


@pytest.mark.parametrize(("on_cpu", "stopped"), [(True, 2), (False, 1)])
def test_a_failed_start_stops_the_other_engines(
    qwen2_5_omni: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, stopped: int
) -> None:
    starts = Starts(together=3 if on_cpu else 1, fails=2)
    with pytest.raises(RuntimeError, match="no room"):
        start(qwen2_5_omni, starts, on_cpu, monkeypatch)
    assert starts.stopped == stopped
