# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks, one process each, with the libraries already imported.

Importing torch and vLLM takes 5 to 10 s of CPU time, which every rank of every test would pay with
the start method `spawn`. The processes here use Python's `forkserver` with a list of modules to
preload. The server starts on first use, serves the whole test run, computes nothing and has one
thread, so that forking it is safe. Its children see the environment that it was started with.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]
_TESTS = Path(__file__).parents[1]
_PRELOADED = (
    "vllm_omni.model_executor.vllm_model",
    "vllm_omni.entrypoints.endpoints",
    "vllm.entrypoints.openai.api_server",
    "diffusers.models.autoencoders",
    "torch._dynamo",
    "transformers",
    "helpers.frozen_imports",  # last, because it excludes the modules above from collections
)
"""Modules that take long to import. The server ignores a module that is not installed."""


def server_environment() -> dict[str, str]:
    """Return the variables that the fork server gets in addition to this process's."""
    # The server reads PYTHONPATH; it does not inherit sys.path.
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **threads}


def rank_context() -> ForkServerContext:
    """Return a multiprocessing context whose processes start with the libraries imported.

    The processes communicate over the loopback interface.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with mock.patch.dict(os.environ, server_environment()):
        # `quick_spawn` replaces this attribute in processes that use another process's server
        _server.ensure_running()
    return context


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], size: int) -> None:
    """Run `work(rank, *args)` on `size` ranks and raise the first rank's exception, if any."""
    rank_context()
    mp.start_processes(work, args, nprocs=size, start_method="forkserver")
