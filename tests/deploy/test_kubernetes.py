# SPDX-License-Identifier: Apache-2.0
"""The manifests in `deploy/kubernetes` conform to the Kubernetes API schemas and are consistent
with each other, the server and HAProxy.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helpers.scripts import load_script

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli.serve import serve_parser
from vllm_omni.entrypoints.limits.access import OPEN_PATHS
from vllm_omni.entrypoints.telemetry import metrics
from vllm_omni.entrypoints.telemetry.logs import known_variables

DEPLOY = Path(__file__).parents[2] / "deploy"
README = DEPLOY / "README.md"
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())


def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def manifest(kind: str, name: str = "vllm-omni") -> dict[str, Any]:
    (found,) = (
        each for each in manifests() if each["kind"] == kind and each["metadata"]["name"] == name
    )
    return found["spec"] | {"metadata": found["metadata"]}


def container(kind: str, name: str = "vllm-omni") -> dict[str, Any]:
    (only,) = manifest(kind, name)["template"]["spec"]["containers"]
    return dict(only)


def arguments() -> list[str]:
    return [text.replace("$(POD_NAME)", "vllm-omni-0") for text in container("StatefulSet")["args"]]


def omni() -> OmniConfig:
    """Return the server options in the manifests, parsed as the server parses them."""
    words = [word for word in arguments() if word != "--omni"]
    args = serve_parser().parse_args(["serve", *words])
    return OmniConfig.from_additional_config(args.additional_config)


def servers_of_readme() -> dict[str, str]:
    """Return the servers listed in the README's command that writes HAProxy's configuration."""
    command = re.search(r"^python3 deploy/haproxy/configure\.py --.*$", README.read_text(), re.M)
    assert command is not None
    words = shlex.split(command[0])
    return dict(word.split("=", 1) for word in words if re.fullmatch(r"[\w-]+=[\w.-]+:\d+", word))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_accepts_every_manifest(version: str) -> None:
    """Every manifest passes a strict schema check, which rejects unknown fields. The checker ships
    with the schemas, so the test needs no network.
    """
    kinds = []
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)
        kinds.append(each["kind"])
    assert {"StatefulSet", "Deployment", "Service", "HorizontalPodAutoscaler"} <= set(kinds)
    assert kinds.count("PodDisruptionBudget") == 2


def test_the_schemas_refuse_a_mistyped_field() -> None:
    broken = next(each for each in manifests() if each["kind"] == "StatefulSet")
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_a_server_accepts_its_arguments_and_variables() -> None:
    from vllm import envs

    assert omni().server_name == "vllm-omni-0"
    names = {each["name"] for each in container("StatefulSet")["env"]} - {"POD_NAME"}
    for name in names - {"FORWARDED_ALLOW_IPS"}:  # `FORWARDED_ALLOW_IPS` belongs to uvicorn.
        assert name in envs.environment_variables or name in known_variables()


def test_a_stopping_server_has_time_to_drain() -> None:
    """A server that is being stopped has time to drain. It writes its sessions to its volume, which
    the next pod of the same name mounts.
    """
    spec = manifest("StatefulSet")
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > omni().drain_timeout_s + 10
    mounts = {each["name"]: each["mountPath"] for each in container("StatefulSet")["volumeMounts"]}
    (claim,) = spec["volumeClaimTemplates"]
    assert str(omni().drain_snapshot_dir).startswith(mounts[claim["metadata"]["name"]] + "/")
    assert "/dev/shm" in mounts.values()
    volumes = {each["name"] for each in pod["volumes"]} | {claim["metadata"]["name"]}
    assert volumes == set(mounts)


@pytest.mark.parametrize(
    ("kind", "name"), [("StatefulSet", "vllm-omni"), ("Deployment", "vllm-omni-proxy")]
)
def test_probes_need_no_key(kind: str, name: str) -> None:
    """Probes need no API key. A full server stays alive and ready, because clients of its sessions
    must still reach it.
    """
    probes = [value for key, value in container(kind, name).items() if key.endswith("Probe")]
    paths = {probe["httpGet"]["path"] for probe in probes if "httpGet" in probe}
    assert paths == {"/health"} <= OPEN_PATHS
    ports = {port["name"] for port in container(kind, name)["ports"]}
    used = {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes}
    assert used <= ports


@pytest.mark.parametrize(
    ("kind", "name"), [("StatefulSet", "vllm-omni"), ("Deployment", "vllm-omni-proxy")]
)
def test_everything_selects_its_pods(kind: str, name: str) -> None:
    labels = manifest(kind, name)["template"]["metadata"]["labels"]
    assert manifest(kind, name)["selector"]["matchLabels"] == labels
    assert manifest("Service", name)["selector"] == labels
    assert manifest("PodDisruptionBudget", name)["selector"]["matchLabels"] == labels
    targets = {port["targetPort"] for port in manifest("Service", name)["ports"]}
    assert targets <= {port["name"] for port in container(kind, name)["ports"]}
    policy = manifest("NetworkPolicy")
    admitted = [
        peer.get("podSelector", {}).get("matchLabels") for peer in policy["ingress"][0]["from"]
    ]
    assert labels in admitted


def test_the_number_of_servers_follows_their_sessions() -> None:
    """The autoscaler uses a metric that the servers export. The metric's target value is below the
    number of sessions that a server accepts.
    """
    scaler = manifest("HorizontalPodAutoscaler")
    assert scaler["scaleTargetRef"]["kind"] == "StatefulSet"
    ((metric),) = scaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f'"{name}"' in Path(metrics.__file__).read_text()
    assert int(metric["pods"]["target"]["averageValue"]) < omni().max_sessions
    assert scaler["minReplicas"] == manifest("StatefulSet")["replicas"]


def test_haproxy_knows_every_server() -> None:
    """HAProxy's configuration contains every server: the README's command lists the maximum number
    of servers by DNS name.
    """
    service, spec = manifest("Service"), manifest("StatefulSet")
    assert spec["serviceName"] == service["metadata"]["name"] and service["clusterIP"] == "None"
    name, port = spec["metadata"]["name"], service["ports"][0]["port"]
    count = manifest("HorizontalPodAutoscaler")["maxReplicas"]
    assert servers_of_readme() == {
        f"{name}-{number}": f"{name}-{number}.{spec['serviceName']}:{port}"
        for number in range(count)
    }


def test_the_proxy_has_the_files_that_its_configuration_names() -> None:
    config = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    mounts = {
        each["mountPath"] for each in container("Deployment", "vllm-omni-proxy")["volumeMounts"]
    }
    for path in re.findall(r" (/[\w/.]+)/[\w.]+(?: mode| alpn)", config):
        assert path in mounts
    ports = {each["containerPort"] for each in container("Deployment", "vllm-omni-proxy")["ports"]}
    assert ports == {int(port) for port in re.findall(r"^    bind :(\d+)", config, re.M)}


def test_configure_writes_each_server_in_all_places() -> None:
    configure = load_script(DEPLOY / "haproxy" / "configure.py").configure
    template = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    text = configure(template, {"x-1": "h:1", "x-2": "h:2", "x-3": "h:3"}, "resolvers cluster")
    assert "-m str x-1 x-2 x-3\n" in text and " a 127.0.0.1" not in text
    for number in (1, 2, 3):
        line = f"    server x-{number} h:{number}"
        assert f"{line} resolvers cluster\n" in text
        assert f"{line} track servers/x-{number} resolvers cluster\n" in text
        is_down = f"-m str x-{number} }} !{{ srv_is_up(servers/x-{number}) }}\n"
        assert f"set-var(txn.is_down) bool(true) if {{ var(txn.server) {is_down}" in text
        serves_page = "if is_page !has_room !is_named !is_addressed"
        is_up = f"{{ srv_is_up(servers/x-{number}) }}\n"
        assert f"set-var(txn.server) str(x-{number}) {serves_page} {is_up}" in text
    with pytest.raises(ValueError, match="five places"):
        configure(text, {"y": "h:1"})
