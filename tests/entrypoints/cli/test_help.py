# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni COMMAND --help` prints a description, examples that can be copied, and help for each
argument.
"""

import argparse
import shlex

import pytest

from vllm_omni.entrypoints.cli.main import main, make_parser
from vllm_omni.model_executor.models.registry import family_names, known_names

COMMANDS: dict[str, argparse.ArgumentParser] = next(
    action.choices  # type: ignore[misc]
    for action in make_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)
OWN = sorted(set(COMMANDS) - {"serve"})
"""All commands except `serve`, which prints vLLM's help."""


@pytest.mark.parametrize("name", OWN)
def test_a_command_describes_itself(name: str) -> None:
    """Every command has a summary, a longer description, and help for each of its arguments."""
    parser = COMMANDS[name]
    assert parser.description is not None and len(parser.description) > 60
    assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize("name", OWN)
def test_the_examples_of_a_command_parse(name: str) -> None:
    title, *examples = (COMMANDS[name].epilog or "").splitlines()
    assert title == "examples:" and examples
    for program, *arguments in map(shlex.split, examples):
        if (program, arguments[0]) == ("vllm", "serve"):
            continue
        assert program == "vllm-omni"
        if "--help" not in arguments:
            make_parser().parse_args(arguments)
    assert any(f"vllm-omni {name}" in example for example in examples)


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("make-tiny", family_names()),
        ("download", ["lance", "waypoint_360p"]),
        ("verify", ["lance", "waypoint"]),
    ],
)
def test_a_command_lists_its_model_names(
    name: str, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The help text of a command that takes a model name lists the model names."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = set(capsys.readouterr().out.replace(",", " ").split())
    assert set(models) <= shown
    assert "null_image" not in shown or name == "make-tiny"
    assert set(models) <= set(known_names())


def test_the_help_of_serve_describes_this_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help text of `serve` describes this package before vLLM's own help, which covers only
    language models.
    """
    from vllm_omni.entrypoints.cli import serve

    seen: list[list[str]] = []
    monkeypatch.setattr(serve, "launch", lambda argv, worker: seen.append(argv))
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert seen == [["--help"]]
    assert "vllm serve my_world --omni" in capsys.readouterr().out
