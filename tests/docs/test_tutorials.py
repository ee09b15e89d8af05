# SPDX-License-Identifier: Apache-2.0
"""Tutorials work as printed. The tests write the files of a tutorial, apply its changes and run its
commands.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import snippets as docs
from helpers.ports import port_for_a_server
from helpers.programs import background_server
from helpers.waits import seconds, wait_until

from vllm_omni.entrypoints.media.mp4 import decode_mp4

PAGE = docs.REPO / "docs" / "tutorials" / "add_a_model.md"
CHANGE = "## 6. Now change it"


class Checkout:
    """A checkout as edited by a reader: links to the files of this checkout, plus the reader's own
    files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("vllm_omni", "examples"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(
                docs.REPO / name, folder / name, copy_function=os.symlink, ignore=ignored
            )
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def write_file(self, name: str, text: str) -> None:
        """Write a file that the page prints. Fails if this repository already has the file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text + "\n")

    def apply_change(self, text: str) -> None:
        """Apply a `diff` block: a line `--- FILE`, followed by lines that start with a space, `-`
        or `+`.
        """
        name, *lines = text.splitlines()
        path = self.folder / name.removeprefix("--- ")
        old = "".join(f"\n{line[1:]}" for line in lines if line[0] != "+")
        new = "".join(f"\n{line[1:]}" for line in lines if line[0] != "-")
        content = "\n" + path.read_text()
        assert content.count(f"{old}\n") == 1, f"{path.name} has {content.count(old)} times: {old}"
        path.unlink()
        path.write_text(content.replace(old, new)[1:])

    def run_command(self, command: list[str], port: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one of the page's commands until it exits. A client command connects to the server at
        `port`.
        """
        if command[0] == "vllm-omni":
            command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", *command[1:]]
        else:
            assert command[0] == "python", f"the test cannot run {command[0]}"
            command = [sys.executable, *command[1:], "--server", f"ws://127.0.0.1:{port}"]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds(200),
            check=False,
        )

    @contextmanager
    def serve(self, command: list[str]) -> Iterator[int]:
        """Run the page's `vllm serve` command on a free port.

        Yields the port when the server accepts sessions.
        """
        port = port_for_a_server()
        words = [*command[1 : command.index("--port")], "--port", str(port)]
        with background_server(words, self.folder, self.environment) as (server, log):
            wait_until(
                lambda: (
                    server.poll() is not None or "Application startup complete" in log.read_text()
                ),
                600,
                lambda: log.read_text()[-3000:],
                every_s=0.5,
            )
            assert server.poll() is None, log.read_text()[-3000:]
            yield port


def parts(*, changed: bool) -> list[docs.Snippet]:
    """Return the blocks of the page's "change" section if `changed` is set, and otherwise the
    blocks before that section.
    """
    line = PAGE.read_text().split(CHANGE)[0].count("\n")
    return [snippet for snippet in docs.snippets(PAGE) if (snippet.line > line) == changed]


def edit(checkout: Checkout, *, changed: bool) -> None:
    for snippet in parts(changed=changed):
        if snippet.language == "python":
            name = docs.file_of_reader(snippet)
            assert name is not None, f"{snippet.where}: the first line must name the file"
            checkout.write_file(name, snippet.text)
        elif snippet.language == "diff":
            checkout.apply_change(snippet.text)


def commands(*, changed: bool) -> list[list[str]]:
    shell = [snippet.text for snippet in parts(changed=changed) if snippet.language == "bash"]
    return [command for text in shell for command in docs.commands(text)]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def test_the_model_of_the_tutorial_is_known_after_its_edits(checkout: Checkout) -> None:
    """The tutorial's family is registered after the reader's edits, both before and after the
    change.

    `make-tiny` writes a checkpoint that this family detects.
    """
    make_tiny = commands(changed=False)[0]
    edit(checkout, changed=False)
    ended = checkout.run_command(make_tiny)
    assert ended.returncode == 0, ended.stderr[-2000:]
    edit(checkout, changed=True)
    code = (
        "import sys; from pathlib import Path\n"
        "from vllm_omni.model_executor.models.registry import detect_family\n"
        "from vllm_omni.model_executor.models.checkers.pipeline import SPACE, CheckersPipeline\n"
        "from vllm_omni.model_executor.interfaces import SupportsStepExecution\n"
        "missing = [n for n in vars(SupportsStepExecution) if n[0] != '_' and not "
        "hasattr(CheckersPipeline, n)]\n"
        "print(detect_family(Path(sys.argv[1])).name, SPACE.button_names[-1], missing)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, make_tiny[-1]],
        cwd=checkout.folder,
        env=checkout.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout.strip().endswith("checkers run []"), shown.stderr[-2000:]


def walked(checkout: Checkout, client: list[str], port: int) -> np.ndarray:
    ended = checkout.run_command(client, port)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    frames_THWC, _ = decode_mp4((checkout.folder / client[-1]).read_bytes())
    return frames_THWC


@pytest.mark.nightly  # starts two servers, 30 to 60 s each
def test_the_tutorial_works_as_printed(checkout: Checkout) -> None:
    """The tutorial's world is served and responds to its keys. The world supports `run` only after
    the change.
    """
    edit(checkout, changed=False)
    make_tiny, serve, walk = commands(changed=False)
    serve_again, run = commands(changed=True)
    ended = checkout.run_command(make_tiny)
    assert ended.returncode == 0, ended.stderr[-2000:]
    with checkout.serve(serve) as port:
        frames = walked(checkout, walk, port)
        refused = checkout.run_command(run, port)
    assert refused.returncode != 0 and "run" in refused.stdout + refused.stderr
    assert len(frames) == 1 + 4 * 11 and frames.shape[1:] == (96, 160, 3)
    # Frame 20 is the last frame that moves to the right, five latent frames after frame 0. The
    # tolerance allows for H.264 compression loss: the measured difference was 0.7, and at least 40
    # for any other position.
    assert np.abs(moved(frames[0], columns=5) - frames[20]).mean() < 8
    edit(checkout, changed=True)
    with checkout.serve(serve_again) as port:
        ran = walked(checkout, run, port)
    assert np.abs(moved(ran[0], columns=15) - ran[20]).mean() < 8


def moved(frame: np.ndarray, columns: int) -> np.ndarray:
    """Return the frame after the camera has moved `columns` steps of 8 pixels to the right. The
    floor pattern repeats every 64 pixels.
    """
    longer = np.concatenate([frame, frame[:, 32:96]], axis=1)
    return longer[:, np.arange(160) + columns * 8 % 64].astype(np.float64)


def test_every_command_on_the_page_is_run() -> None:
    """The tests above run every command on the page."""
    assert [command[0] for command in commands(changed=False)] == ["vllm-omni", "vllm", "python"]
    assert [command[0] for command in commands(changed=True)] == ["vllm", "python"]
    assert re.search(r"^" + re.escape(CHANGE) + "$", PAGE.read_text(), re.M)
