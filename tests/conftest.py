# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests, and the markers that select tests.

The fixtures provide tiny checkpoints and an in-process model runner that needs no engine.
"""

import gc
import json
import os
import time

# Set these variables before vLLM is imported. The K/V pool is small. Each process runs one thread,
# so results and run times are stable on two cores.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import quick_spawn
from helpers.cpu_build import refuse_cpu_worker
from hypothesis import settings
from vllm import envs

from vllm_omni.model_executor.models.registry import get_family

# By default, Hypothesis fails an example that takes longer than 200 ms. Correct code can take
# longer on a busy machine.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

_ENGINE_FOLDER = "tests/engine/"
_ENGINE_FIXTURES = frozenset({"null_engine", "served", "image_server", "world_server"})
_ENGINE_STARTERS = frozenset({"running_engine", "shared_engine", "AsyncLLM", "LLM", "Served"})
"""Names that start an engine. If a test file imports one of them, all of its tests are marked
`engine`.
"""
_INIT_PORT_FILE = "dist-init"
_RARE_COLLECTIONS = (10_000, 10, 10)
_CUDA_PROCESSES_PER_GPU = 5
_CORES_PER_CUDA_PROCESS = 3


def _runs_cuda_tests(config: pytest.Config) -> bool:
    return str(config.option.markexpr).startswith("cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Start engines from the fork server under `make test`. Under `make test-cuda`, give each
    pytest-xdist process its own first GPU, and a folder for vLLM's caches.

    The processes must not share vLLM's caches, because vLLM writes compiled graphs in place, so
    another process could read an incomplete file.
    """
    if torch.version.cuda is not None:
        refuse_cpu_worker()
    elif "not nightly" in config.option.markexpr:
        quick_spawn.install()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and _runs_cuda_tests(config):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
        first = int(worker.removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
        os.environ["VLLM_CACHE_ROOT"] = str(Path(envs.VLLM_CACHE_ROOT) / "tests" / worker)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of test processes.

    `make test-cuda` uses up to five processes per GPU, because its engines reserve little memory
    and mostly wait for the CPU, which imports and compiles. On a CUDA build, other test runs use
    one process, because an engine reserves most of a GPU's memory. On a CPU, three processes keep
    two cores busy, because server tests spend time waiting for timeouts and paced streams.
    """
    if _runs_cuda_tests(config):
        num_gpus = torch.cuda.device_count()
        most = (os.cpu_count() or 1) // _CORES_PER_CUDA_PROCESS
        return max(num_gpus, min(num_gpus * _CUDA_PROCESSES_PER_GPU, most))
    return 0 if torch.version.cuda is not None else 3


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the engine tests, or files without CUDA tests, when they are deselected."""
    if collection_path.is_dir():
        deselected = "not engine" in config.option.markexpr
        deselected &= collection_path == config.rootpath / _ENGINE_FOLDER
    else:
        is_test = collection_path.match("test_*.py") and _runs_cuda_tests(config)
        deselected = is_test and "cuda" not in collection_path.read_text()
    return True if deselected else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start an engine or a browser, and the slow tests listed in durations.json.

    Tests of the source code are never marked as slow, so `make check` runs all of them.

    Files that start engines run first in each pytest-xdist process. They take longest, so running
    them early lets all processes finish at about the same time.
    """
    slow_tests = json.loads((Path(__file__).parent / "durations.json").read_text())
    for item in items:
        if item.nodeid in slow_tests and item.get_closest_marker("source") is None:
            item.add_marker("slow")
        fixtures = getattr(item, "fixturenames", ())
        module = item.getparent(pytest.Module)
        names = frozenset() if module is None else frozenset(vars(module.obj))
        if (
            item.nodeid.startswith(_ENGINE_FOLDER)
            or _ENGINE_FIXTURES.intersection(fixtures)
            or _ENGINE_STARTERS & names
        ):
            item.add_marker("engine")
        if "browser" in fixtures:
            item.add_marker("browser")
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("engine")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, and collect garbage less often.

    vLLM calls the garbage collector five times while an engine starts and stops. With Python's
    default thresholds, garbage collection took 5 % of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RARE_COLLECTIONS)


def pytest_unconfigure() -> None:
    """Unfreeze all objects, because native libraries log errors about objects that are never
    collected.
    """
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes tiny checkpoints.

    `tiny_checkpoint(family, layout="original", seed=0)` returns a checkpoint directory. Each
    checkpoint is written once per process, so tests must not change it.
    """

    @cache
    def written(family: str, layout: str = "original", seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}_{layout}")
        get_family(family).make_tiny(folder, seed, layout)
        return folder

    return written


@pytest.fixture(scope="session")
def null_world(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A `null_world` checkpoint directory."""
    return tiny_checkpoint("null_world")


@pytest.fixture(scope="session")
def lingbot_world(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A tiny LingBot World checkpoint in the original layout."""
    return tiny_checkpoint("lingbot_world")


@pytest.fixture(scope="session")
def village() -> Path:
    """The trained world that ships with the package: a LingBot World checkpoint in the v2 layout
    for video of 160x96 pixels.
    """
    from vllm_omni.worlds import village_checkpoint

    return village_checkpoint()


@pytest.fixture(scope="session")
def causal_wan(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A tiny causal Wan checkpoint in the original layout."""
    return tiny_checkpoint("causal_wan")


@pytest.fixture(scope="session")
def qwen2_5_omni(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A tiny Qwen2.5-Omni checkpoint."""
    return tiny_checkpoint("qwen2_5_omni")


@pytest.fixture(scope="session")
def tiny_language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 model with a tokenizer, in the Hugging Face Transformers layout."""
    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    return write_tiny_language_model(tmp_path_factory.mktemp("tiny_language_model"))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run vLLM's FP8 quantization uncompiled.

    On a CPU, compiling the quantization takes 2 s, or 10 s if inductor's cache is empty.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def no_offloader_left() -> Iterator[None]:
    """Reset vLLM's process-wide offloader after a test that sets it."""
    yield
    from vllm.model_executor.offloader import set_offloader

    set_offloader(None)


@pytest.fixture(scope="session")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Initialize vLLM's process groups for a single rank in this process."""
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


def freeze_old_objects() -> None:
    """Exclude objects left by earlier tests from garbage collection once collections become slow.

    vLLM calls the garbage collector twice whenever it loads a model. Late in the suite, this would
    take 0.5 s per model.
    """
    started_s = time.perf_counter()
    gc.collect()
    if time.perf_counter() - started_s > _SLOW_COLLECTION_S:
        gc.freeze()


@pytest.fixture(scope="session")
def make_runner(single_rank: None) -> RunnerFactory:
    """Return `make(checkpoint_dir, omni={...}, **engine_args)`, which builds a warm runner on the
    CPU.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    import vllm_omni.worker
    from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
    from vllm_omni.worker.diffusion.warm_up import warm_up

    # Importing vLLM's CPU worker configures torch for the CPU, as in a worker process.
    assert vllm_omni.worker.DiffusionGPUWorker

    def make(
        model: Path,
        omni: dict[str, Any] | None = None,
        scheduler_cls: str | None = None,
        **engine_args: Any,
    ) -> DiffusionGPUModelRunner:
        freeze_old_objects()
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
