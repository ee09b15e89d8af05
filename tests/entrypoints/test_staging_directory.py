# SPDX-License-Identifier: Apache-2.0
"""In a shared staging directory, a server that starts deletes the files of killed servers and no
others.
"""

import subprocess
import sys
from pathlib import Path

from vllm_omni.entrypoints.staging_directory import StagingDirectory

SERVER = """
import sys
from pathlib import Path
from vllm_omni.entrypoints.staging_directory import StagingDirectory
staging = StagingDirectory(Path(sys.argv[1]))
staging.new_path().write_bytes(b"half a world")
print(staging.owner, flush=True)
sys.stdin.read()
"""


def server(folder: Path) -> "tuple[subprocess.Popen[str], str]":
    command = [sys.executable, "-c", SERVER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_only_files_of_a_killed_server_are_deleted(tmp_path: Path) -> None:
    """The directory contains files from a killed server, a live server and a server that exited
    normally, as well as an unrelated file. Only the killed server's files are deleted.
    """
    (tmp_path / "vllm_omni-notes.txt").write_text("mine")
    killed, dead = server(tmp_path)
    living, alive = server(tmp_path)
    killed.kill()
    killed.wait()
    staging = StagingDirectory(tmp_path)
    assert staging.sweep() == {dead}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in names if dead in name]
    assert len([name for name in names if alive in name]) == 2
    assert "vllm_omni-notes.txt" in names
    living.communicate("")
    assert staging.sweep() == set()  # the server exited normally and deleted its lock
    staging.close()
    assert not list(tmp_path.glob("*.owner"))
