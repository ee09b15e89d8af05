# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests: tiny checkpoints, and a runner in this process without an engine
around it.
"""

import gc
import os
import time

# Before vLLM is imported anywhere: small KV pool, one thread per process (results and timings stay
# stable on 2 cores).
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import quick_spawn
import torch
from hypothesis import settings

from vllm_omni.model_executor.models.registry import get_family

# By default an example may take 200 ms by the clock: on a busy machine that fails tests of what is
# right.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

pytest_plugins = [
    "cuda_workers",
    "engine_tests",
    "nightly_shards",
    "quick_files",
    "quick_workers",
    "suite_times",
    "two_processes",
]

_INIT_PORT_FILE = "dist-init"
_SELDOM = (10_000, 10, 10)


def pytest_configure(config: pytest.Config) -> None:
    """The suite of every commit starts its engines quickly; nightly tests, and those run by
    name, as vLLM does.
    """
    may_fork = torch.version.cuda is None
    if may_fork and "not nightly" in config.option.markexpr:
        quick_spawn.install()


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: vLLM collects five times while an engine
    starts and ends.

    Python's own come seldom, too: with its thresholds they were a twentieth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SELDOM)


def pytest_unconfigure() -> None:
    """Native libraries complain about what is never collected."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def null_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `null_world` checkpoint directory."""
    out = tmp_path_factory.mktemp("null_world")
    get_family("null_world").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="session")
def lingbot_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LingBot World checkpoint in the original layout."""
    out = tmp_path_factory.mktemp("lingbot_world")
    get_family("lingbot_world").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="session")
def village() -> Path:
    """The trained world that comes with the package: 160x96, a LingBot World in the v2 layout."""
    from vllm_omni.worlds import village_checkpoint

    return village_checkpoint()


@pytest.fixture(scope="session")
def causal_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal Wan checkpoint in the original layout."""
    out = tmp_path_factory.mktemp("causal_wan")
    get_family("causal_wan").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="session")
def qwen2_5_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Omni checkpoint."""
    out = tmp_path_factory.mktemp("qwen2_5_omni")
    get_family("qwen2_5_omni").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="session")
def tiny_language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 model with a tokenizer, in transformers' layout."""
    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    return write_tiny_language_model(tmp_path_factory.mktemp("tiny_language_model"))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """vLLM compiles its rounding to FP8 on a CPU: up to 10 s where inductor's cache is empty, 2
    s where it is not.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def no_offloader_left() -> Iterator[None]:
    """vLLM's offloader is one of the process: it ends with the test that has set it."""
    yield
    from vllm.model_executor.offloader import set_offloader

    set_offloader(None)


@pytest.fixture(scope="session")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups for a world of one, in this process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    init_file = tmp_path_factory.mktemp("dist") / _INIT_PORT_FILE
    os.environ["VLLM_DIST_IDENT"] = "tests"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{init_file}", 0, "gloo")
        initialize_model_parallel()
    yield
    cleanup_dist_env_and_memory()


RunnerFactory = Callable[..., Any]

_SLOW_COLLECTION_S = 0.006


def leave_out_what_is_old() -> None:
    """vLLM collects garbage twice whenever it loads a model: half a second late in the suite, if
    all that earlier tests have left is looked through each time.
    """
    started_s = time.perf_counter()
    gc.collect()
    if time.perf_counter() - started_s > _SLOW_COLLECTION_S:
        gc.freeze()


@pytest.fixture(scope="session")
def make_runner(single_rank: None) -> RunnerFactory:
    """`make_runner(checkpoint_dir, omni={...}, scheduler_cls=None)` -> a warmed-up runner on
    CPU; others as vLLM's.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    import vllm_omni.worker
    from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
    from vllm_omni.worker.diffusion.warm_up import warm_up

    # as in a worker process: vLLM's CPU module prepares torch for CPU
    assert vllm_omni.worker.DiffusionGPUWorker

    def make(
        model: Path,
        omni: dict[str, Any] | None = None,
        scheduler_cls: str | None = None,
        **engine_args: Any,
    ) -> DiffusionGPUModelRunner:
        leave_out_what_is_old()
        args = EngineArgs(
            model=str(model),
            config_format="omni",
            skip_tokenizer_init=True,
            enforce_eager=True,
            scheduler_cls=scheduler_cls,
            additional_config={"omni": {"height": 32, "width": 48, **(omni or {})}},
            **engine_args,
        )
        vllm_config = args.create_engine_config()
        with set_current_vllm_config(vllm_config), torch.inference_mode():
            runner = DiffusionGPUModelRunner(vllm_config, torch.device("cpu"))
            runner.load_model()
            warm_up(runner)
        return runner

    return make
