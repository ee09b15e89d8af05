# SPDX-License-Identifier: Apache-2.0
"""The executor implements every call that vLLM's engine makes to workers. The tests extract these
calls from vLLM's source.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request, step
from vllm.v1.engine import core
from vllm.v1.executor import abstract

from vllm_omni.executor import DiffusersPipelineExecutor
from vllm_omni.executor.diffusers_pipeline_executor import PipelineWorker
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.worker.diffusion.sessions.store import SessionStore

# Worker methods that a pipeline engine never calls, each with the reason.
UNREACHABLE = {
    "sample_tokens": "the executor implements it",
    "save_sharded_state": "the executor refuses it by name",
    "shutdown": "the executor calls it directly",
    "profile": "the executor calls it directly",
    "execute_model": "the executor calls it directly",
    "compute_weight_checksums": "RL weight sync; refused by vLLM's own NotImplementedError",
    "elastic_ep_execute": "expert parallelism",
}
SMALL = {"height": 32, "width": 48, "num_inference_steps": 3}


def requested_of_workers() -> list[str]:
    source = inspect.getsource(abstract) + inspect.getsource(core)
    return sorted(set(re.findall(r'collective_rpc\(\s*(?:#[^\n]*\n\s*)?"(\w+)"', source)))


def test_the_pattern_finds_remote_calls() -> None:
    """The pattern finds remote calls in vLLM's source. If vLLM changed the form of these calls, the
    pattern would no longer match, and this test would fail.
    """
    assert {"get_kv_cache_spec", "initialize_from_config", "sleep", "synchronize_device"} <= set(
        requested_of_workers()
    )


@pytest.mark.parametrize(
    "name", [name for name in requested_of_workers() if name not in UNREACHABLE]
)
def test_every_worker_method_exists(name: str) -> None:
    assert callable(getattr(PipelineWorker, name, None))


@pytest.fixture(scope="module")
def executor(
    tiny_pipelines: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Yield a real executor with a real engine configuration but no engine."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(tiny_pipelines("qwen_image")),
        config_format="omni",
        skip_tokenizer_init=True,
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": str(tmp_path_factory.mktemp("trace")),
        },
    )
    config = args.create_engine_config()
    # The config hook selects the executor.
    assert abstract.Executor.get_class(config) is DiffusersPipelineExecutor
    executor = DiffusersPipelineExecutor(config)
    yield executor
    executor.shutdown()
    executor.shutdown()


def run(executor: Any, request_id: str = "a") -> Any:
    data = new_request(request_id, session_id=request_id, prompt="a fox", seed=1, **SMALL)
    output = executor.execute_model(step(new=[data]), non_block=True).result()
    while output.pooler_output[0] is None:
        output = executor.execute_model(step(running=[request_id]))
    executor.execute_model(step(finished=[request_id]))
    return unpack(output.pooler_output[0])


def test_calls_at_startup(executor: Any) -> None:
    """At startup, the executor reports no K/V cache and a single supported task, and accepts vLLM's
    other startup calls.
    """
    assert executor.get_kv_cache_specs() == [{}]
    assert executor.supported_tasks == ("plugin",)
    assert executor.determine_available_memory() == [0]
    assert not executor.supports_async_scheduling()
    executor.initialize_from_config([])
    executor.compile_or_warm_up_model()
    executor.check_health()
    assert (
        executor.worker.runner.info.class_name == "QwenImagePipeline"
        and executor.worker.runner.host.nbytes > 0
    )


def test_session_statistics_have_the_keys_of_a_worker(executor: Any) -> None:
    """The executor's session statistics have the same keys as a worker's, because `/omni/ready` and
    the metrics read these keys from every executor.
    """
    (stats,) = executor.collective_rpc("session_stats")
    assert stats.keys() == SessionStore(max_sessions=1, idle_s=1.0).stats().keys()


def test_rpcs_by_name_callable_and_future(executor: Any) -> None:
    """An RPC returns a list with one result. An unknown name or a failure raises an exception, even
    if the result is read through a future.
    """
    assert executor.collective_rpc("request_progress") == [{}]
    assert executor.collective_rpc(lambda worker, n: [*worker.loras(), n], args=(1,)) == [[1]]
    assert executor.collective_rpc("loras", non_block=True).result() == [[]]
    with pytest.raises(NotImplementedError):
        executor.collective_rpc("no_such_method")
    assert isinstance(
        executor.collective_rpc("no_such_method", non_block=True).exception(), NotImplementedError
    )


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_give_the_same_image(executor: Any, level: int) -> None:
    """A sleeping executor refuses requests. After it wakes up, it generates the same image as
    before.
    """
    before = run(executor)[1]["images"]
    executor.sleep(level)
    assert executor.is_sleeping and (executor.worker.runner.host.nbytes == 0) == (level == 2)
    with pytest.raises(RequestFailed, match="asleep"):
        run(executor, "asleep")
    executor.wake_up()
    assert not executor.is_sleeping
    assert torch.equal(run(executor)[1]["images"], before)


def test_sleep_during_a_request(executor: Any) -> None:
    """A request that is running when sleep level 1 starts continues afterwards, and its result is
    bit-identical to the result without sleep. After sleep level 2, the request ends with an error.
    """
    expected = run(executor)[1]["images"]
    fields = {"prompt": "a fox", "seed": 1, **SMALL}
    executor.execute_model(step(new=[new_request("kept", session_id="kept", **fields)]))
    executor.sleep(1)
    executor.wake_up()
    for _ in range(3):
        output = executor.execute_model(step(running=["kept"]))
    assert torch.equal(unpack(output.pooler_output[0])[1]["images"], expected)
    executor.execute_model(
        step(new=[new_request("lost", session_id="lost", **fields)], finished=["kept"])
    )
    executor.sleep(2)
    executor.wake_up()
    output = executor.execute_model(step(running=["lost"]))
    with pytest.raises(RequestFailed, match="put to sleep during this request"):
        unpack(output.pooler_output[0])
    executor.execute_model(step(finished=["lost"]))


def test_profiling_traces_the_pipelines_thread(executor: Any) -> None:
    """A profile started during a request contains the operators of the remaining steps, although
    they run on the pipeline's thread.
    """
    executor.execute_model(
        step(new=[new_request("p", session_id="p", prompt="a fox", seed=1, **SMALL)])
    )
    executor.profile(is_start=True)
    executor.execute_model(step(running=["p"]))
    executor.profile(is_start=False)
    executor.execute_model(step(finished=["p"]))
    folder = Path(executor.vllm_config.profiler_config.torch_profiler_dir)
    traces = [file for file in folder.rglob("*") if file.is_file()]
    assert len(traces) >= 1
    import gzip

    content = max(traces, key=lambda file: file.stat().st_size).read_bytes()
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    assert b"aten::" in text


def test_each_profile_has_its_own_prefix(executor: Any) -> None:
    """Each profile uses its own file prefix rather than an earlier profile's."""
    folder = Path(executor.vllm_config.profiler_config.torch_profiler_dir)
    new = []
    for prefix in ("first", "second", None):
        before = {file.name for file in folder.iterdir()}
        executor.profile(is_start=True, profile_prefix=prefix)
        executor.profile(is_start=False)
        new.append(
            {file.name.split(".")[0] for file in folder.iterdir() if file.name not in before}
        )
    assert new == [{"first_pipeline"}, {"second_pipeline"}, {"pipeline"}]


def test_unsupported_calls_raise(executor: Any) -> None:
    """Unsupported calls raise an error instead of silently doing nothing."""
    with pytest.raises(NotImplementedError, match="save_pretrained"):
        executor.save_sharded_state("x")
    with pytest.raises(NotImplementedError, match="sleep level 2"):
        executor.discard(("weights",))
    executor.sleeping_tags.clear()
    with pytest.raises(ValueError, match="not an iterator"):
        executor.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(())})


def test_more_than_one_rank_is_refused(tiny_pipelines: Callable[[str], Path]) -> None:
    """The config hook rejects more than one rank before any process starts."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(tiny_pipelines("sd3")),
        config_format="omni",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
    )
    with pytest.raises(ValueError, match="one process and one device"):
        args.create_engine_config()
