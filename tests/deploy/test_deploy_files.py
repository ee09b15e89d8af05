# SPDX-License-Identifier: Apache-2.0
"""Every command, flag, variable, path and exit status mentioned in a file in `deploy` exists.

tests/entrypoints/realtime/test_operators_served.py checks that a real server exports the metrics
that the alerting rules and the dashboard use.
"""

import argparse
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli.serve import serve_parser
from vllm_omni.entrypoints.limits.access import OPEN_PATHS
from vllm_omni.entrypoints.limits.quotas import QuotaFile
from vllm_omni.entrypoints.telemetry.logs import known_variables
from vllm_omni.runtime.exit_codes import ENGINE_DIED

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
UNIT = DEPLOY / "vllm-omni.service"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
KNOWN = {
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "ARG",
    "USER",
    "ENV",
    "EXPOSE",
    "HEALTHCHECK",
    "STOPSIGNAL",
    "ENTRYPOINT",
    "CMD",
}
"""Docker instructions that the Dockerfiles in this repository use."""


def lines(path: Path) -> list[str]:
    """Return a file's lines without comments, with continued lines joined."""
    retained = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(retained)).splitlines()


def unit() -> dict[str, list[str]]:
    """Return every `Name=value` in the systemd unit, regardless of its section."""
    found: dict[str, list[str]] = {}
    for line in lines(UNIT):
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    return found


def only(name: str) -> str:
    (value,) = unit()[name]
    return value


def environment() -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines(DEPLOY / "server.env") if line)


def parse(command: list[str]) -> argparse.Namespace:
    """Parse a `vllm serve ... --omni` command as the server does; an unknown flag is an error."""
    assert command[:2] == ["vllm", "serve"] and "--omni" in command
    args: argparse.Namespace = parser().parse_args(
        ["serve", *(word for word in command[2:] if word != "--omni")]
    )
    OmniConfig.from_additional_config(args.additional_config)
    return args


@cache
def parser() -> argparse.ArgumentParser:
    return serve_parser()


def test_the_server_accepts_the_command_of_the_unit() -> None:
    binary, *rest = shlex.split(only("ExecStart"))
    assert Path(binary).name == "vllm"
    command = [
        environment().get(word[2:-1], word) if word.startswith("${") else word for word in rest
    ]
    args = parse(["vllm", *command])
    assert args.model_tag == environment()["MODEL"]
    assert args.logging_config.formatter == "json"


def test_the_unit_restarts_a_server_that_failed_except_after_status_2_or_130() -> None:
    statuses = re.findall(r"^\| (\d+)", (REPO / "docs/how_to/operations.md").read_text(), re.M)
    assert only("Restart") == "on-failure"
    ignored = {only("RestartPreventExitStatus"), only("SuccessExitStatus")}
    assert ignored == {"2", "130"} and ignored < set(statuses)
    assert str(ENGINE_DIED) in statuses and str(ENGINE_DIED) not in ignored


def test_the_unit_lets_the_server_finish() -> None:
    """systemd gives the server time to drain.

    systemd sends SIGTERM only to the server, which stops its engine itself. systemd kills the
    remaining processes only after the longest time that a drain can take.
    """
    command = shlex.split(only("ExecStart"))
    omni = OmniConfig.from_additional_config(
        json.loads(command[command.index("--additional-config") + 1])
    )
    assert only("KillMode") == "mixed"
    assert int(only("TimeoutStopSec")) > omni.drain_timeout_s + 10
    state = f"/var/lib/{only('StateDirectory')}/"
    assert str(omni.drain_snapshot_dir).startswith(state)
    assert environment()["VLLM_OMNI_MEDIA_DIR"].startswith(state)


def test_every_environment_variable_of_the_unit_is_used() -> None:
    from vllm import envs

    for name in environment():
        assert (
            name in envs.environment_variables
            or name in known_variables()
            or f"${{{name}}}" in only("ExecStart")
        )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` accepts the unit. The test replaces the command in the unit, because
    systemd checks that the program exists.
    """
    copy = tmp_path / UNIT.name
    copy.write_text(
        UNIT.read_text().replace(
            "/opt/vllm-omni/.venv/bin/vllm", shutil.which("true") or "/bin/true"
        )
    )
    checked = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    said = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert checked.returncode == 0 and not said, checked.stderr


# -- Docker ----------------------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    pairs = [line.partition(" ") for line in lines(path) if line.strip()]
    return [(name, rest.strip()) for name, _, rest in pairs]


def test_there_is_a_dockerfile_for_each_device() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfiles_commands_flags_and_paths_exist(path: Path) -> None:
    steps = instructions(path)
    assert {name for name, _ in steps} <= KNOWN and steps[0][0] == "FROM"
    for name, rest in steps:
        if name == "COPY":
            assert all((REPO / source).exists() for source in rest.split()[:-1]), rest
    ran = " ".join(rest for name, rest in steps if name == "RUN")
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {
        extra for group in re.findall(r"\.\[([\w,]+)\]", ran) for extra in group.split(",")
    } <= set(extras)
    by_name = dict(steps)
    parse([*json.loads(by_name["ENTRYPOINT"]), *json.loads(by_name["CMD"])])
    (probe,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[a-z/]+)", by_name["HEALTHCHECK"])
    assert probe[0] == by_name["EXPOSE"] and probe[1] in OPEN_PATHS
    # The user must be numeric, because Kubernetes cannot tell from a name whether the user is root.
    assert (
        int(by_name["USER"]) > 0
        and f"--uid {by_name['USER']} " in ran
        and by_name["STOPSIGNAL"] == "SIGTERM"
    )


def test_the_build_context_is_what_the_dockerfiles_copy() -> None:
    """The Docker build context excludes large results. It also excludes virtual environments,
    because their links would break.
    """
    rules = lines(REPO / ".dockerignore")
    assert rules[0] == "*"
    retained = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = [
        rest.split()[:-1]
        for path in DOCKERFILES
        for name, rest in instructions(path)
        if name == "COPY"
    ]
    assert retained == {source for sources in copied for source in sources}


@pytest.mark.nightly
def test_hadolint_accepts_the_dockerfiles() -> None:
    """hadolint accepts the Dockerfiles. Each rule that does not apply is disabled in the Dockerfile
    itself, with a reason.
    """
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs the extra `release`")
    checked = subprocess.run([hadolint, *DOCKERFILES], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_every_docker_run_makes_room_for_the_engines_messages() -> None:
    """Every `docker run` command raises the size of `/dev/shm`, because a server crashes with a bus
    error at Docker's default of 64 MB.
    """
    texts = [*DOCKERFILES, REPO / "docs/how_to/operators.md"]
    ran = [
        line for path in texts for line in re.findall(r"docker run (?:.*\\\n)*.*", path.read_text())
    ]
    assert len(ran) >= 4 and all("--shm-size" in line for line in ran)


# -- Prometheus, Grafana, quotas -------------------------------------------------------------------


def test_prometheus_finds_the_rules_and_every_alert_says_what_is_wrong() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    (group,) = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in (
            "page",
            "ticket",
            "info",
        )
    assert f'up{{job="{job["job_name"]}"}} == 0' in [rule["expr"] for rule in group["rules"]]


def test_the_dashboards_panels_do_not_overlap_and_use_its_own_variables() -> None:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board["panels"])))
    assert used == variables
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_server_accepts_the_example_quotas() -> None:
    found = QuotaFile.read_file(DEPLOY / "quotas.toml")
    assert found.keys["studio"].sha256 == hashlib.sha256(b"change-me").hexdigest()
