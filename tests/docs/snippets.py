# SPDX-License-Identifier: Apache-2.0
"""Extract fenced blocks and shell commands from the documentation, and check each kind of command.

An unknown kind of command is a failure, so an untested command cannot be added by accident.
`vllm-omni` commands run in processes that are forked after the libraries have been imported
(`rank_processes`). tests/entrypoints/cli/test_demo.py starts the installed script, and
test_doctor.py in the same folder runs `doctor`.
"""

import argparse
import ast
import builtins
import contextlib
import importlib
import io
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from helpers.quick_programs import run_python
from helpers.scripts import load_script

REPO = Path(__file__).parents[2]

NOT_RUN = {
    "sha256sum": "reads the files of `make release`",
    "git": "needs the network",
    "cd": "belongs to the reader's shell",
    "source": "belongs to the reader's shell",
    "export": "belongs to the reader's shell",
    "apt": "installs system packages",
    "curl": "needs a running server",
    "docker": "needs a container runtime",
    "kubectl": "needs a cluster; the manifests are read by tests/deploy/test_kubernetes.py",
    "sudo": "changes the machine; files named behind it are read by "
    "tests/deploy/test_deploy_files.py",
    "nvidia-smi": "needs a GPU",
    "vbench": "another project's program, which downloads its networks",
    "torchrun": "needs several ranks",
    "ray": "needs a cluster",
}
"""Commands that the tests do not run, and the reason for each."""

_FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks)[ ]*$",
    re.M | re.S,
)
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#|mailto:)([^)#\s]+)[^)]*\)")


class DocsError(AssertionError):
    """A documentation snippet does not work."""


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page, with its page, line, language and text."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(REPO) if self.path.is_relative_to(REPO) else self.path}:{self.line}"  # noqa: E501


def documents() -> list[Path]:
    """Return the README, the pages in docs/, and the pages next to code and examples."""
    patterns = (
        "*.md",
        "docs/**/*.md",
        "deploy/**/*.md",
        "examples/**/*.md",
        "benchmarks/**/*.md",
        "vllm_omni/**/*.md",
    )
    return sorted({path for pattern in patterns for path in REPO.glob(pattern)})


def snippets(path: Path) -> Iterator[Snippet]:
    text = path.read_text()
    for match in _FENCE.finditer(text):
        language = match["info"].split()[0] if match["info"].split() else ""
        body = "\n".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines())
        yield Snippet(path, text.count("\n", 0, match.start()) + 1, language, body)


def links(path: Path) -> list[str]:
    """Return the targets of relative links outside fenced blocks."""
    return _LINK.findall(_FENCE.sub("", path.read_text()))


def commands(script: str) -> list[list[str]]:
    """Split a shell block into commands.

    Continuation lines are joined; comments, prompts and `&&` are removed.
    """
    result: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&;|"):
                if command:
                    result.append(command)
                command = []
            else:
                command.append(word)
    return result


def blocked_commands(script: str) -> list[list[str]]:
    """Return the commands that cannot run because an earlier command of the block keeps running.

    If a block starts several servers, the later commands are alternatives to the first one and are
    not returned.
    """
    serving = False
    for line in script.replace("\\\n", " ").splitlines():
        for command in commands(line):
            words = [word for word in command if not _ASSIGNMENT.match(word)]
            serves = words[:2] in (["vllm", "serve"], ["vllm-omni", "serve"])
            if serving and not serves:
                return [command]
            serving = serves and not line.rstrip().endswith("&")
    return []


# ---- checks; each raises DocsError
# ------------------------------------------------------------------------------


def check_command(command: list[str], runs_in: Path, *, execute: bool = True) -> None:
    """Check a command according to its kind. Run it in the folder `runs_in` if it is cheap and
    `execute` is set.
    """
    while command and _ASSIGNMENT.match(command[0]):
        command = command[1:]
    if not command:
        return
    name, arguments = command[0], command[1:]
    if name == "make":
        _check_make(arguments)
    elif name == "vllm":
        _check_vllm(arguments)
    elif name == "vllm-omni":
        _check_vllm_omni(arguments, runs_in, execute)
    elif name in ("python", "python3", "python3.11"):
        _check_python(arguments)
    elif name == "pip":
        _check_pip(arguments)
    elif name == "uv" and arguments[:1] in (["pip"], ["tool"]):
        _check_pip(arguments[1:])
    elif name not in NOT_RUN:
        raise DocsError(
            f"no check knows the command {name!r}; add one, or a reason to NOT_RUN: "
            f"{shlex.join(command)}"
        )


def _check_make(arguments: list[str]) -> None:
    result = subprocess.run(
        ["make", "-n", "-C", REPO, *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise DocsError(f"make {shlex.join(arguments)}: {result.stderr.strip()}")


def _check_vllm(arguments: list[str]) -> None:
    if arguments[:1] != ["serve"]:
        raise DocsError(f"only `vllm serve` is documented, got: vllm {shlex.join(arguments)}")
    if "--omni" in arguments:
        from vllm_omni.entrypoints.cli.serve import serve_parser

        _parse(serve_parser(), [argument for argument in arguments if argument != "--omni"])
    else:
        _parse(_stock_parser(), arguments)


def _stock_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def _check_vllm_omni(arguments: list[str], runs_in: Path, execute: bool) -> None:
    from vllm_omni.entrypoints.cli.main import make_parser

    if arguments[:1] == ["serve"]:
        _check_vllm([*arguments, "--omni"])
        return
    if arguments not in (["--version"], ["--help"]):
        _parse(make_parser(), arguments)
    if not execute:
        return
    if arguments[:1] in (["--version"], ["--help"]):
        _run_once(tuple(arguments))
    elif arguments[:1] in (["make-tiny"], ["make-world"], ["verify"]) or "--dry-run" in arguments:
        _run(arguments, runs_in)


@cache
def _run_once(arguments: tuple[str, ...]) -> None:
    """Run a command at most once per process, in the repository root. The result must not depend on
    the current folder.
    """
    _run(list(arguments), REPO)


def _run(arguments: list[str], runs_in: Path) -> None:
    command = ("-m", "vllm_omni.entrypoints.cli.main", *arguments)
    ended = run_python(*command, limit_s=600, folder=runs_in)
    if ended.returncode != 0:
        raise DocsError(
            f"vllm-omni {shlex.join(arguments)} ended with {ended.returncode}: "
            f"{(ended.stdout + ended.stderr)[-500:]}"
        )


def _check_python(arguments: list[str]) -> None:
    if arguments[:2] in (["-m", "pytest"], ["-m", "venv"]) or arguments[:1] == ["-c"]:
        return
    if arguments[:1] == ["-m"]:  # checked by the parser of its __main__.py
        arguments = [f"{arguments[1].replace('.', '/')}/__main__.py", *arguments[2:]]
    path = REPO / (arguments[0] if arguments else "")
    if not path.is_file():
        raise DocsError(f"there is no script {arguments[:1]}")
    if "argparse" in path.read_text():
        _parse(load_script(path).make_parser(), arguments[1:])


def _check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for argument in arguments:
        if arguments[0] == "install" and re.match(r"vllm.(omni|worlds)\b(?!.*\.whl\b)", argument):
            raise DocsError(
                f"pip install {argument}: the package index has another project with this import "
                "name, and not this one"
            )
        for group in re.findall(r"^(?:\.|[\w.-]+\.whl)\[([^\]]*)\]", argument):
            unknown = [name for name in group.split(",") if name not in extras]
            if unknown:
                raise DocsError(
                    f"pip install {argument}: unknown extra {unknown}; there are "
                    f"{', '.join(extras)}"
                )


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    if any(
        argument in ("-h", "--help") or argument.startswith("--help=") for argument in arguments
    ):
        return
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parser.parse_args(arguments)
    except (SystemExit, ValueError) as error:
        last = (complaint.getvalue().strip().splitlines() or [str(error)])[-1]
        raise DocsError(f"{shlex.join(arguments)}: {last}") from error


def check_python_code(text: str) -> None:
    """Check that the code compiles and its imports exist."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise DocsError(f"does not compile: {error}") from error
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
        except ImportError as error:
            raise DocsError(f"line {node.lineno}: {error}") from error


STAND_INS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "my_text_model",
    '{"hidden_state_layers": [12]}': '{"hidden_state_layers": [1]}',
    "(12, -1)": "(1, -1)",
}
"""Replacements in snippets: text that would require a download, mapped to text for the page's tiny
model.
"""

_FILE_OF_READER = re.compile(r"# ((?:vllm_omni|tests|examples)/[\w/]+\.py)\n")


def file_of_reader(snippet: Snippet) -> str | None:
    """Return the file that a tutorial block is written to. The block's first line names this file.

    Returns None for other blocks.
    """
    match = _FILE_OF_READER.match(snippet.text)
    return match[1] if match and snippet.path.parent == REPO / "docs" / "tutorials" else None


_SERVER = ":8000"
_STARTS_ENGINES = ("LLM(", "WorldVectorEnv.load(")


def snippet_kind(snippet: Snippet) -> str:
    """Return how a Python block is run.

    Returns:
        `file`: a file of a tutorial, which tests/docs/test_tutorials.py writes and runs.
        `fragment`: not run, because the block uses names that it does not define.
        `plain`: needs neither an engine nor a server, or only defines functions.
        `engine`: starts an engine.
        `client`: calls the server of its page.
    """
    if file_of_reader(snippet) is not None:
        return "file"
    tree = ast.parse(snippet.text)
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    bound = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    definitions = (ast.FunctionDef, ast.ClassDef)
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if used - bound - set(dir(builtins)) - {"__name__"}:
        return "fragment"
    if all(isinstance(node, (*definitions, ast.Import, ast.ImportFrom)) for node in tree.body):
        return "plain"
    if _SERVER in snippet.text:
        return "client"
    return "engine" if any(call in snippet.text for call in _STARTS_ENGINES) else "plain"


def write_script(snippet: Snippet, folder: Path, port: int | None = None) -> Path:
    """Write a block as a script, with the replacements in `STAND_INS` applied and the port of the
    page's server filled in.
    """
    text = snippet.text
    for shown, stand_in in STAND_INS.items():
        text = text.replace(shown, stand_in)
    if port is not None:
        text = text.replace(_SERVER, f":{port}")
    script = folder / f"{snippet.path.stem}_{snippet.line}.py"
    script.write_text(text)
    return script


def server_command(page: Path, folder: Path, port: int) -> list[str]:
    """Return the page's first `vllm serve` command whose model exists in `folder`, with its port
    changed to `port`.
    """
    for snippet in snippets(page):
        for command in (
            commands(snippet.text) if snippet.language in ("bash", "sh", "shell") else []
        ):
            if (
                command[:2] == ["vllm", "serve"]
                and (folder / command[2]).is_dir()
                and "--omni" in command
            ):
                words = command[1:]
                if "--port" in words:
                    at = words.index("--port")
                    words = words[:at] + words[at + 2 :]
                return [*words, "--port", str(port)]
    raise DocsError(f"{page}: no `vllm serve` command of a model that the page makes")


def check_json(text: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise DocsError(f"is not JSON: {error}") from error
