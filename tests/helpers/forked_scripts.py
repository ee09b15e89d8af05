# SPDX-License-Identifier: Apache-2.0
"""`run_script`: a script as a process of its own, forked from one that has the libraries imported.

As `subprocess.run([sys.executable, script, ...])`, without the second that a new python takes to
import what the script does. What that leaves out, that the script finds its libraries by itself, is
for one test of each script to show.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.rank_processes import rank_context
from helpers.waits import seconds


def run_script(
    script: Path, *arguments: object, limit_s: float = 600
) -> "subprocess.CompletedProcess[str]":
    """Its status and what it wrote.

    A script that has not ended in time is killed; its status says so.
    """
    command = [str(script), *map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        process = rank_context().Process(
            target=_be, args=(command, os.getcwd(), output.name, errors.name)
        )
        process.start()
        process.join(seconds(limit_s))
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, output.read(), errors.read())


def _be(command: list[str], folder: str, output: str, errors: str) -> None:
    os.chdir(folder)
    for stream, name in ((1, output), (2, errors)):
        os.dup2(os.open(name, os.O_WRONLY), stream)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
