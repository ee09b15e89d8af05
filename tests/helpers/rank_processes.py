# SPDX-License-Identifier: Apache-2.0
"""`run_ranks`: a function on several ranks, a process each, forked from one that has the libraries
imported.

Importing them takes 5 to 10 s of CPU time: with a start method of `spawn` every rank of every test
would pay it. The server that forks is one process for a whole test run, started on first use, or
forked from pytest's own process where that has been forked too (quick_workers.py): it computes
nothing and has one thread, so forking it is safe. Its children see the environment as it was then.
Held by the tests that use it; a rank's exception is theirs.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import torch.multiprocessing as mp
from helpers.fork_server import server_environment

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]
_IMPORTED = (
    *(
        "vllm_omni.model_executor.vllm_model",
        "diffusers.models.autoencoders",
        "torch._dynamo",
        "transformers",
    ),
    "helpers.frozen_imports",
)
"""What takes long; a missing one is imported by whoever needs it.

The last keeps garbage collections off the rest.
"""


def rank_context() -> ForkServerContext:
    """A context whose processes start with the libraries imported.

    They talk over the loopback interface.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with mock.patch.dict(os.environ, server_environment()):
        # the module's function of this name is bound to the class's method, see fork_server
        _server.ensure_running()
    return context


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], size: int) -> None:
    """Run `work(rank, *args)` on every rank; raises what the first failing one raised, as
    `mp.spawn` does.
    """
    rank_context()
    mp.start_processes(work, args, nprocs=size, start_method="forkserver")
