# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each in its own process with the libraries already imported.

Importing torch and vLLM takes 5 to 10 s of CPU time. With the `spawn` start method, every rank of
every test would import them. This module instead uses Python's `forkserver` with a list of modules
to preload. The fork server starts on first use and serves the whole test run. It can be forked
safely, because it computes nothing and has only one thread. Its children inherit the environment
that it was started with.
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
    "helpers.frozen_imports",  # last, because it excludes the modules above from garbage collection
)
"""Modules that are slow to import. The fork server ignores modules that are not installed."""


def server_environment() -> dict[str, str]:
    """Return the environment variables that the fork server gets in addition to those of this
    process.
    """
    # The fork server needs PYTHONPATH, because it does not inherit sys.path.
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **threads}


def rank_context() -> ForkServerContext:
    """Return a multiprocessing context whose processes start with the libraries already imported.

    The processes communicate over the loopback interface.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with mock.patch.dict(os.environ, server_environment()):
        # `quick_spawn` replaces this method in processes that use another process's fork server.
        _server.ensure_running()
    return context


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], size: int) -> None:
    """Run `work(rank, *args)` on `size` ranks. If any rank fails, re-raise the first failing rank's
    exception.
    """
    rank_context()
    mp.start_processes(work, args, nprocs=size, start_method="forkserver")
