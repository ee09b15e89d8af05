# SPDX-License-Identifier: Apache-2.0
"""Processes of `pytest -n` find the libraries imported, and are otherwise what xdist would have
started.
"""

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import execnet
import psutil
import pytest
import quick_workers
import torch
from helpers.programs import has_ended
from helpers.waits import seconds, wait_until

Send = """
import os, sys
is_a_file = hasattr(sys.modules["__main__"], "__file__")
channel.send(("wave" in sys.modules, is_a_file, os.getpid(), os.getppid(), os.environ.get("PYTHONPATH")))
channel.send(channel.receive() + 1)
"""  # noqa: E501

Send_A_RANK = """
import os
from helpers.rank_processes import rank_context
context = rank_context()
ours, theirs = context.Pipe()
def ask(code):
    process = context.Process(target=exec, args=(code, {"answer": theirs.send}))
    process.start()
    process.join(30)
    return ours.recv()
modules = ask("import sys; answer('wave' in sys.modules)")
variables = ask("import os; answer((os.environ['GLOO_SOCKET_IFNAME'], os.getppid()))")
channel.send((modules, variables[0], variables[1], os.getpid()))
"""


class Config:
    """What the plugin asks of pytest's."""

    def __init__(self) -> None:
        self.running = contextlib.ExitStack()
        self.add_cleanup = self.running.callback


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Iterator[execnet.XSpec]:
    """How a process is started, while the server runs."""
    monkeypatch.setattr(quick_workers, "IMPORTED", ("no_such_module", "wave"))
    config, spec = Config(), execnet.XSpec("execmodel=main_thread_only//popen")
    with config.running:
        quick_workers.pytest_xdist_setupnodes(config, [spec])
        yield spec


@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA, processes start as ever")
def test_processes_are_forked_from_one_that_has_imported(spec: execnet.XSpec) -> None:
    """Through execnet, as xdist does it; a module that is not there is no reason not to start."""
    group = execnet.Group()
    responses = []
    for _ in range(2):
        channel = group.makegateway(spec).remote_exec(Send)
        responses.append(channel.receive(30))
        channel.send(41)
        assert channel.receive(30) == 42
        spec.id = None
    assert [response[:2] for response in responses] == [(True, False)] * 2
    (*_, first, parent, path), (*_, second, same_parent, _) = responses
    assert parent == same_parent != os.getpid() and first != second
    assert path == os.environ.get("PYTHONPATH")
    assert psutil.Process(parent).ppid() == os.getpid()
    group.terminate(10)
    assert has_ended(first)


@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA, processes start as ever")
def test_classes_of_models_are_inspected_without_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also those that vLLM's cache does not know."""
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    # put back afterwards
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.delitem(sys.modules, "helpers.models_inspected_here", raising=False)
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    importlib.import_module(quick_workers.IMPORTED[-1])
    world = registry._LazyRegisteredModel(
        "vllm_omni.testing.null.world.pipeline", "NullWorldPipeline"
    )
    assert world.inspect_model_cls().architecture == "NullWorldPipeline"


@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA, processes start as ever")
def test_so_are_the_ranks_that_they_start(spec: execnet.XSpec) -> None:
    """By a server that is forked, not started, and ends with its process."""
    group = execnet.Group()
    channel = group.makegateway(spec).remote_exec(Send_A_RANK)
    has_imported, interface, server, process = channel.receive(60)
    assert (has_imported, interface) == (True, "lo")
    assert psutil.Process(server).ppid() == process
    group.terminate(10)
    wait_until(lambda: has_ended(server))


def test_nothing_is_left_of_the_server() -> None:
    """Once whoever started it is done; also where it never forked."""
    # of tests that ran before in this process
    others = {child.pid for child in psutil.Process().children()}
    with quick_workers.server([]) as address:
        assert os.path.exists(address)
        [server] = [child for child in psutil.Process().children() if child.pid not in others]
    assert not server.is_running() and not os.path.exists(address)


def test_a_process_ends_as_its_program_does() -> None:
    """What xdist started is there for as long as the process that was forked for it."""
    with quick_workers.server([]) as address:
        write = (
            "[(s.write(x), s.flush()) for s, x in ((sys.stdout, 'here'), (sys.stderr, 'there'))]"
        )
        code = f"import os, sys; {write}; os._exit(3)"
        done = subprocess.run(
            quick_workers.command("join", address),
            input=f"{code!r}\n",
            capture_output=True,
            text=True,
            timeout=seconds(60),
            check=True,
        )
    assert (done.stdout, done.stderr) == ("here", "there")


def test_what_xdist_started_outlasts_the_forked_process(tmp_path: Path) -> None:
    """To its very end: python closes its sockets before it tears down the rest, which takes
    torch a while.
    """
    lines = (
        "import os, sys, time",
        "class Slow:",
        "  def __del__(self, sleep=time.sleep): sleep(0.5)",
    )
    code = "\n".join((*lines, "os.slow = Slow()", "sys.stdout.write(str(os.getpid()))"))
    with quick_workers.server([]) as address, (tmp_path / "pid").open("w+") as output:
        join = quick_workers.command("join", address)
        subprocess.run(
            join, input=f"{code!r}\n", stdout=output, text=True, timeout=seconds(60), check=True
        )
        output.seek(0)
        assert psutil.Process(int(output.read())).status() == psutil.STATUS_ZOMBIE


def test_other_ways_to_start_processes_are_left_alone() -> None:
    """`--tx` with another python, or on another machine."""
    config = Config()
    specs = [execnet.XSpec(text) for text in (f"popen//python={sys.executable}", "ssh=somewhere")]
    with config.running:
        quick_workers.pytest_xdist_setupnodes(config, specs)
    assert [spec.python for spec in specs] == [sys.executable, None]
