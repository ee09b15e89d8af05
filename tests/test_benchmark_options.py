# SPDX-License-Identifier: Apache-2.0
"""No benchmark offers an option of the engine and leaves it out: its number would be that of
another engine.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waits import seconds

from benchmarks.common import add_serving_arguments, add_tracing_arguments, precision_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OFFERS = {
    add_serving_arguments.__name__: add_serving_arguments,
    add_tracing_arguments.__name__: add_tracing_arguments,
}


def options_of(script: str) -> set[str]:
    """Names of the options that a script takes from `common`."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, offer in OFFERS.items():
        if f"{name}(parser)" in script:
            offer(parser)
    return {action.dest for action in parser._actions}


def unread(script: str) -> set[str]:
    """Those of its options that a script does not read, itself or by a function of `common`."""
    read = set(re.findall(r"\bargs\.(\w+)", script))
    if "precision_of(args)" in script:
        read |= set(precision_of(argparse.Namespace(dtype=0, quantization=0, kv_cache_dtype=0)))
    if "trace_folder(args" in script:
        read.add("traces")
    return options_of(script) - read


@pytest.mark.parametrize("name", ["fp8", "village_in_browser"])
def test_a_benchmark_that_uses_helpers_of_the_tests_finds_them(name: str) -> None:
    """Started from a shell, without the path that pytest sets."""
    path = BENCHMARKS / f"{name}.py"
    assert '"tests"' in path.read_text()
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    subprocess.run(
        [sys.executable, path, "--help"],
        env=environment,
        stdout=subprocess.DEVNULL,
        timeout=seconds(120),
        check=True,
    )


SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if options_of(path.read_text()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_option_is_read(name: str) -> None:
    assert not unread((BENCHMARKS / name).read_text())


def test_an_option_that_no_one_reads_is_found() -> None:
    script = (
        "add_serving_arguments(parser)\nprint(args.eager, args.gpu_memory_utilization, "
        "precision_of(args))"
    )
    assert unread(script) == {"model_options", "omni_options"} and len(SCRIPTS) > 8
