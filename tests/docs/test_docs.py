# SPDX-License-Identifier: Apache-2.0
"""The commands, code blocks and links of the documentation work."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import snippets as docs
from helpers.ports import port_for_a_server
from helpers.programs import background_server
from helpers.quick_programs import run_python, wait_until_healthy
from helpers.waits import seconds

from vllm_omni.model_executor.checkpoint.hub import HubSource, hub_source
from vllm_omni.model_executor.models.registry import known_names
from vllm_omni.testing.tiny.language_model import write_tiny_language_model

SHELL = ("bash", "sh", "shell", "console")
ALL = [snippet for path in docs.documents() for snippet in docs.snippets(path)]


TUTORIALS = docs.REPO / "docs" / "tutorials"
"""Pages with files and commands that depend on each other. test_tutorials.py runs them in order."""


def of(*languages: str) -> pytest.MarkDecorator:
    found = [snippet for snippet in ALL if snippet.path.parent != TUTORIALS]
    chosen = [
        pytest.param(snippet, id=snippet.where)
        for snippet in found
        if snippet.language in languages
    ]
    return pytest.mark.parametrize("snippet", chosen)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[docs.Snippet], Path]:
    """Return a function that maps a snippet to the folder shared by all commands on its page. The
    folder looks like a fresh checkout.
    """

    @cache
    def folder_for(page: Path) -> Path:
        folder = tmp_path_factory.mktemp("reader")
        for name in ("tests", "examples", "benchmarks", "vllm_omni"):
            (folder / name).symlink_to(docs.REPO / name)
        return folder

    return lambda snippet: folder_for(snippet.path)


@of(*SHELL)
def test_commands_are_real(snippet: docs.Snippet, reader: Callable[[docs.Snippet], Path]) -> None:
    """Each command runs, is accepted by its program's parser, or has an entry that explains why the
    command is not run.
    """
    for command in docs.commands(snippet.text):
        docs.check_command(command, reader(snippet))


@of("python", "py")
def test_code_compiles_and_its_imports_exist(snippet: docs.Snippet) -> None:
    """The code of a snippet compiles and its imports exist, so a snippet cannot import a name that
    was renamed or removed.
    """
    docs.check_python_code(snippet.text)


def of_kind(kind: str) -> list[object]:
    found = [
        snippet
        for snippet in ALL
        if snippet.language in ("python", "py") and docs.snippet_kind(snippet) == kind
    ]
    return [pytest.param(snippet, id=snippet.where) for snippet in found]


@pytest.mark.parametrize("snippet", of_kind("plain"))
def test_a_complete_snippet_runs(
    snippet: docs.Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete snippet runs as a script in the reader's folder."""
    monkeypatch.chdir(tmp_path)
    ended = run_python(docs.write_script(snippet, tmp_path), limit_s=600)
    assert ended.returncode == 0, ended.stderr[-2000:]


def prepare(page: Path, folder: Path) -> None:
    """Run the page's commands that write models, and add a start image and a text model."""
    for snippet in docs.snippets(page):
        for command in docs.commands(snippet.text) if snippet.language in SHELL else []:
            if (
                command[:2] in (["vllm-omni", "make-tiny"], ["vllm-omni", "make-world"])
                and not (
                    folder
                    / next(word for word in reversed(command[2:]) if not word.startswith("-"))
                ).exists()
            ):
                docs.check_command(command, folder)
    start = docs.REPO / "vllm_omni" / "entrypoints" / "cli" / "data" / "start.png"
    (folder / "start.png").write_bytes(start.read_bytes())
    if "my_text_model" in page.read_text() and not (folder / "my_text_model").exists():
        write_tiny_language_model(folder / "my_text_model")


def printed_environment() -> dict[str, str]:
    """Return this process's environment without the variable that limits the memory of the suite's
    engines.
    """
    return {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}


@pytest.mark.nightly  # starts an engine for each snippet, 30 to 60 s
@pytest.mark.parametrize("snippet", of_kind("engine"))
def test_a_snippet_with_an_engine_runs(
    snippet: docs.Snippet, reader: Callable[[docs.Snippet], Path]
) -> None:
    """A snippet that starts an engine runs with the models that its page creates, without setting
    environment variables.
    """
    folder = reader(snippet)
    prepare(snippet.path, folder)
    script = docs.write_script(snippet, folder)
    ended = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=printed_environment(),
        capture_output=True,
        text=True,
        timeout=seconds(400),
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]


@pytest.mark.nightly  # starts a server for each snippet, 30 to 90 s
@pytest.mark.parametrize("snippet", of_kind("client"))
def test_a_snippet_of_a_client_runs(
    snippet: docs.Snippet, reader: Callable[[docs.Snippet], Path]
) -> None:
    """A client snippet runs against the server that its page starts."""
    folder, port = reader(snippet), port_for_a_server()
    prepare(snippet.path, folder)
    arguments = docs.server_command(snippet.path, folder, port)
    with background_server(arguments, folder, printed_environment()) as (server, log):
        wait_until_healthy(server, port, log)
        script = docs.write_script(snippet, folder, port)
        ended = subprocess.run(
            [sys.executable, script],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds(200),
            check=False,
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:] + log.read_text()[
            -2000:
        ]


@of("json")
def test_json_is_json(snippet: docs.Snippet) -> None:
    """Every `json` block in the docs parses, so readers can paste the JSON options as they are."""
    docs.check_json(snippet.text)


def test_every_block_names_its_language() -> None:
    """Every fenced block names its language, because a block without a language would not be
    tested. Plain-text blocks use the `text` language.
    """
    known = {
        *SHELL,
        "python",
        "py",
        "json",
        "text",
        "yaml",
        "toml",
        "mermaid",
        "html",
        "javascript",
        "make",
        "diff",
    }
    assert [
        f"{snippet.where} ({snippet.language!r})"
        for snippet in ALL
        if snippet.language not in known
    ] == []


@pytest.mark.parametrize(
    "path", docs.documents(), ids=lambda path: str(path.relative_to(docs.REPO))
)
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links point to files that exist."""
    assert [target for target in docs.links(path) if not (path.parent / target).exists()] == []


@of(*SHELL)
def test_a_block_can_be_pasted(snippet: docs.Snippet) -> None:
    """A block can be pasted into a shell: after a command that keeps running, the block contains
    only alternatives to that command.
    """
    assert docs.blocked_commands(snippet.text) == []


def test_no_text_installs_the_other_project_of_this_name() -> None:
    """No page installs `vllm-omni` or `vllm-worlds` from the package index. There, `vllm-omni` is
    another project, and `vllm-worlds` does not exist yet.

    Extras are installed from the checkout: `pip install ".[env]"`.
    """
    folders = ("vllm_omni", "examples", "docs", "benchmarks", "scripts")
    files = [
        path
        for folder in folders
        for path in (docs.REPO / folder).rglob("*")
        if path.suffix in (".py", ".md")
    ]
    assert len(files) > 300
    named = re.compile(r"pip install[^`\n]*\bvllm[-_](omni|worlds)\[")
    assert [
        str(path) for path in [docs.REPO / "README.md", *files] if named.search(path.read_text())
    ] == []


def test_the_readme_shows_the_two_commands() -> None:
    """The README shows `make demo` and `make test`, because a newcomer needs only these two
    commands.
    """
    shown = [
        command
        for s in ALL
        if s.path == docs.REPO / "README.md" and s.language in SHELL
        for command in docs.commands(s.text)
    ]
    assert ["make", "demo"] in shown
    assert ["make", "test"] in shown


def test_the_readme_names_the_weights_whose_licence_must_be_accepted() -> None:
    """If users must accept a licence to download released weights, the weights' table row in the
    README names the option that accepts it.
    """
    table = (docs.REPO / "README.md").read_text().partition("| weights | licence |")[2]
    accepted = [
        re.sub(r"[^a-z0-9]", "", name.lower())
        for row in table.partition("\n\n")[0].splitlines()
        if "`--accept-license`" in row
        for name in row.split("|")[1].split(",")
    ]
    asked = [
        name.replace("_", "")
        for name, family in known_names().items()
        if (source := released(family, name)) is not None and source.licence is not None
    ]
    assert len(asked) > 5
    assert [
        name
        for name in asked
        if not any(name.startswith(row) or row.startswith(name) for row in accepted)
    ] == []


def released(family: str, name: str) -> HubSource | None:
    """Return the source of released weights, or None if the family has none."""
    try:
        return hub_source(family, name)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "folder", ["vllm_omni", "benchmarks", "scripts", "deploy", "examples", "docs"]
)
def test_tests_that_are_named_exist(folder: str) -> None:
    """Tests named in docstrings and pages exist."""
    texts = [
        path
        for suffix in ("*.py", "*.md")
        for path in (docs.REPO / folder).rglob(suffix)
        if path.name != "results.md"  # results.md contains commands of earlier commits.
    ]
    assert texts
    named = {
        name: path
        for path in texts
        for name in re.findall(r"\btests/[\w/]+\.py\b", path.read_text())
    }
    assert {
        name: str(path) for name, path in named.items() if not (docs.REPO / name).is_file()
    } == {}
