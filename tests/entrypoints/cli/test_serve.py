# SPDX-License-Identifier: Apache-2.0
"""`vllm serve DIR --omni`: arguments that are added or refused, and the time that the checks take.
No server runs in these tests.
"""

import json
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.waits import seconds

from vllm_omni.engine_arguments.table import WorkerKind
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.checkpoints.make_tiny import write_tiny
from vllm_omni.entrypoints.cli.errors import CommandError


@pytest.fixture
def world(null_world: Path) -> str:
    """Return a checkpoint of a model with 4 attention heads."""
    return str(null_world)


def plan(
    *argv: str, environ: dict[str, str] | None = None, plugins: Sequence[str] = ()
) -> serve.ServePlan:
    return serve.plan([*argv, "--port", "0"], environ or {}, plugins)


def test_a_directory_is_enough(world: str) -> None:
    """If only a directory is given, the flags that select the config format, the worker class and
    the scheduler class and that skip the tokenizer are added after the user's arguments.
    """
    assert plan(world).argv == [
        *(world, "--port", "0", "--config-format", "omni"),
        *("--worker-cls", "vllm_omni.worker.DiffusionGPUWorker"),
        *("--scheduler-cls", "vllm_omni.core.sched.StreamBatchScheduler", "--skip-tokenizer-init"),
    ]


def test_arguments_of_the_user_stay(world: str) -> None:
    """A flag is added only if the user has passed neither of its spellings."""
    planned = plan(
        world,
        "--scheduler_cls=my.Scheduler",
        "--worker-cls",
        "my.Worker",
        "--no-skip-tokenizer-init",
    )
    assert planned.argv[-2:] == ["--config-format", "omni"]


@pytest.mark.parametrize(
    ("given", "installed", "expected"),
    [
        (None, ["lora", "vllm_omni"], "lora,vllm_omni"),
        (None, [], "vllm_omni"),
        ("mine,other", ["lora"], "mine,other,vllm_omni"),
        ("vllm_omni,mine", ["lora"], "vllm_omni,mine"),
        ("", ["lora"], "vllm_omni"),
    ],
)
def test_this_plugin_is_added_to_the_others(
    given: str | None, installed: list[str], expected: str
) -> None:
    """Adding this plugin's name to `VLLM_PLUGINS` does not disable other plugins. If the variable
    is unset, vLLM loads all plugins, so the variable is set to the names of all installed plugins.
    """
    assert serve.plugin_names(given, installed) == expected


@pytest.mark.parametrize(
    ("argv", "added"),
    [
        ([], False),
        (["--data-parallel-size", "2"], True),
        (["-dp", "2"], True),
        (["-dp", "2", "--api-server-count", "4"], False),
        (["-dp", "2", "--headless"], False),
        (["-dp", "2", "--data-parallel-rank", "1"], False),
    ],
)
def test_data_parallel_ranks_share_one_api_server(world: str, argv: list[str], added: bool) -> None:
    """Data-parallel ranks share one API server. Stock vLLM would start one API server per rank, and
    a client that reconnects could then reach a server that does not have its session.
    """
    planned = plan(world, *argv).argv
    assert (planned[-2:] == ["--api-server-count", "1"]) == added
    serve.serve_parser().parse_args(["serve", *planned])


def test_the_printed_command_is_one_line_that_vllm_accepts(world: str) -> None:
    """Parsing the printed command with vLLM's own parser yields the original arguments, except for
    the WebSocket flags.
    """
    planned = plan(
        world,
        "--ws-max-size",
        "4096",
        "--ws",
        "websockets",
        "--ws_ping_timeout=5",
        "--served-model-name",
        "a world",
    )
    assert "\n" not in planned.plain_command
    assert "--ws" not in planned.plain_command
    environment, command, subcommand, *rest = shlex.split(planned.plain_command)
    assert (environment, command, subcommand) == ("VLLM_PLUGINS=vllm_omni", "vllm", "serve")

    parser = serve.serve_parser()
    with_omni = vars(parser.parse_args(["serve", *planned.argv]))
    plain = vars(parser.parse_args(["serve", *rest]))
    assert with_omni.pop("ws") == "websockets"
    assert with_omni.pop("ws_max_size") == 4096
    assert with_omni.pop("ws_ping_timeout") == 5.0
    assert {name: value for name, value in plain.items() if name in with_omni} == with_omni
    assert plain["served_model_name"] == ["a world"]
    assert plain["model_tag"] == world


def test_only_ignored_arguments_are_refused(world: str) -> None:
    """Arguments are not rejected if they have the default value of vLLM's parser.
    tests/test_engine_arguments.py tests all rejected arguments.
    """
    parser = serve.serve_parser()
    empty = parser.parse_args(["serve"])
    for worker in WorkerKind:
        serve.refuse_ignored(worker, parser.parse_args(["serve", world]), empty)
        serve.refuse_ignored(
            worker, parser.parse_args(["serve", world, "--kv-cache-dtype", "auto"]), empty
        )
    planned = plan(world)
    serve.refuse_ignored(planned.worker, parser.parse_args(["serve", *planned.argv]), empty)
    given = parser.parse_args(
        ["serve", *planned.argv, "--kv-cache-dtype", "fp8_e5m2", "--max-logprobs", "3"]
    )
    with pytest.raises(
        CommandError,
        match=r"^the diffusion worker does not support --kv-cache-dtype fp8_e5m2: [^;]*$",
    ):
        serve.refuse_ignored(planned.worker, given, empty)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--async-scheduling"], r"--async-scheduling .*: remove it"),
        (["--async_scheduling"], r"--async-scheduling .*: remove it"),
        (["--config-format", "hf"], r"--config-format hf: .* 'omni'"),
        (["--runner", "generate"], r"--runner generate: .* 'pooling'"),
        (["-tp", "3"], r"--tensor-parallel-size 3 .* 4 heads; allowed: 1, 2, 4"),
        (
            ["--additional-config.omni.vae_stage=true"],
            r"omni.vae_stage reserves the last .* --pipeline-parallel-size 2",
        ),
        (
            ["-pp", "2", "--additional-config.omni.pipeline_partition=[4]"],
            r"lists 1 stages, but 2 hold layers",
        ),
        (
            ["--tensor-parallel-size=none"],
            r"--tensor-parallel-size must be a whole number >= 1, got 'none'",
        ),
        (
            ["-pp", "2", "--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"],
            r"--pipeline-parallel-size 2 .* drop --scheduler-cls",
        ),
        (
            ["--additional-config", '{"omni": {"heigth": 480}}'],
            r"`heigth`; did you mean height\?; allowed keys: height, width",
        ),
        (["--additional-config.omni.max_sessions", "0"], r"max_sessions.*allowed keys"),
        (["--additional-config.omni.max_sessions=many"], r"max_sessions.*allowed keys"),
        (["--additional-config", "{omni: 1}"], r"must be JSON such as .*, got '\{omni: 1\}'"),
        (["--additional-config", '{"omni": 3}'], r"and its 'omni' too, got"),
        (["--config", "/nowhere.yaml"], r"--config /nowhere.yaml: cannot be read"),
    ],
)
def test_impossible_arguments_are_refused(world: str, argv: list[str], complaint: str) -> None:
    """The error is one line that states the invalid value, the allowed values and the remedy."""
    with pytest.raises(CommandError, match=complaint) as refused:
        plan(world, *argv)
    assert "\n" not in str(refused.value)


def test_options_in_every_spelling_mean_the_same(world: str, tmp_path: Path) -> None:
    """JSON, dotted keys and a YAML file are equivalent, and the command line overrides the file."""
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: {world}\nadditional-config:\n  omni:\n    max_sessions: "
        "3\nasync_scheduling: false\n"
    )
    for argv in (
        [world, "--additional-config", '{"omni": {"max_sessions": 3}}'],
        [world, "--additional_config.omni.max_sessions", "3"],
        [world, "--additional-config.omni.max_sessions=3"],
        ["--config", str(config)],
    ):
        flags = serve.ServeFlags.scan(argv)
        assert flags.model == world
        assert flags.additional_config() == {"omni": {"max_sessions": 3}}
        assert not flags.is_on("async-scheduling")
    flags = serve.ServeFlags.scan(["--config", str(config), "--additional-config", "{}", "-tp=2"])
    assert flags.additional_config() == {}
    assert flags.count("tensor-parallel-size", "tp") == 2


@pytest.mark.parametrize("given", ["command line", "file"])
def test_json_and_dotted_keys_together_are_one_configuration(
    world: str, tmp_path: Path, given: str
) -> None:
    """JSON and dotted keys are merged into one configuration, which the printed command for plain
    `vllm serve` contains. Stock vLLM would ignore the JSON.
    """
    omni = {"omni": {"max_sessions": 3}}
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"additional-config": omni}))
    first = (
        ["--config", str(config)] if given == "file" else ["--additional_config", json.dumps(omni)]
    )
    planned = plan(world, *first, "--additional-config.omni.height=64", "--api-key", "secret")
    merged = {"omni": {"max_sessions": 3, "height": 64}}
    for argv in (planned.argv, shlex.split(planned.plain_command.partition("vllm serve ")[2])):
        flags = serve.ServeFlags.scan(argv)
        assert json.loads(flags.values["additional-config"]) == merged
        assert not [name for name in flags.values if name.startswith("additional-config.")]
        assert flags.values["api-key"]


def test_on_a_cpu_the_share_of_memory_is_set(world: str) -> None:
    """On a CPU, the memory limit is set unless the user has set either this limit or the memory
    share. If neither were set, vLLM's CPU worker would require most of the memory to be free.
    """
    argv = [world, "--port", "0"]
    planned = serve.plan(argv, {}, [], on_cpu=True)
    assert planned.environ["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "VLLM_CPU_KVCACHE_SPACE=4 vllm serve" in planned.plain_command
    for environ, flags in (
        ({"VLLM_CPU_KVCACHE_SPACE": "1"}, []),
        ({}, ["--gpu-memory-utilization", "0.3"]),
    ):
        planned = serve.plan([*argv, *flags], environ, [], on_cpu=True)
        assert list(planned.environ) == ["VLLM_PLUGINS"]
    assert list(serve.plan(argv, {}, [], on_cpu=False).environ) == ["VLLM_PLUGINS"]


@pytest.mark.parametrize(
    ("layout", "part", "complaint"),
    [
        ("original", "Wan2.1_VAE.pth", r"lacks vae \(looked for vae: Wan2.1_VAE.pth or"),
        ("original", "models_t5_umt5-xxl-enc-bf16.pth", r"lacks text_encoder"),
        ("original", "google", r"lacks tokenizer"),
        (
            "diffusers",
            "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
            r"00001-of-00002",
        ),
        ("v2", "transformers/config.json", r"width 64 is no multiple of 128"),
        ("v2_1_3b", "assets/Wan2.1_VAE.pth", r"lacks vae .*download lingbot_world_v2_1_3b"),
    ],
)
def test_a_missing_part_is_named_before_anything_loads(
    tmp_path: Path, layout: str, part: str, complaint: str
) -> None:
    """A missing component is named in a one-line error. With `--load-format dummy`, weights may be
    missing.
    """
    world = tmp_path / "world"
    write_tiny("lingbot_world", world, layout=layout)
    plan(str(world))
    gone = world / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(CommandError, match=complaint) as refused:
        plan(str(world))
    assert "\n" not in str(refused.value)


def test_a_missing_tensor_is_named_before_anything_loads(tmp_path: Path) -> None:
    """A tensor of the wrong shape is reported before anything is loaded, because tensor names and
    shapes are read from the file headers.
    """
    from safetensors.torch import load_file, save_file

    world = tmp_path / "world"
    write_tiny("lingbot_world", world)
    [shard, *_] = sorted((world / "lingbot_world_fast").glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].flatten()[:-1].clone()}, shard)
    with pytest.raises(CommandError, match=rf"misshapen: 1 \({name}"):
        plan(str(world))
    plan(str(world), "--load-format", "dummy")


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """The error for a directory without a checkpoint lists the expected files and the files
    found.
    """
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CommandError, match=r"is no checkpoint of .*lingbot_world.*found notes.txt"):
        plan(str(tmp_path))
    with pytest.raises(CommandError, match=r"nowhere is not a directory"):
        plan(str(tmp_path / "nowhere"))
    with pytest.raises(CommandError, match=r"no model: pass a checkpoint directory"):
        plan()


def test_a_busy_port_is_found_before_anything_loads(world: str) -> None:
    """A port in use is reported before anything is loaded, because the check binds the port on the
    given host.
    """
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(
            CommandError, match=rf"port {port} of 127.0.0.1 is in use; pass another --port"
        ):
            serve.plan([world, "--host", "127.0.0.1", "--port", str(port)], {}, [])


def test_stock_vllm_calls_this_package_and_a_bad_directory_ends_within_10_s(tmp_path: Path) -> None:
    """vLLM's own hook calls this package for `vllm serve DIR --omni`. For a bad directory, the
    command prints one line to stderr and exits with status 2.

    The time limit applies to CPU time, because other processes may be using the machine.
    """
    vllm = Path(sys.executable).with_name("vllm")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [vllm, "serve", tmp_path / "nowhere", "--omni"],
        capture_output=True,
        text=True,
        timeout=seconds(300),
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("vllm-omni: error: ")]
    assert errors == [
        f"vllm-omni: error: {tmp_path}/nowhere is not a directory; pass a local checkpoint "
        "directory"
    ]
    assert "Traceback" not in result.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def test_the_checks_import_neither_vllm_nor_networks(null_world: Path, lingbot_world: Path) -> None:
    """The checks import neither vLLM, transformers nor diffusers, each of which takes seconds to
    import, so errors appear immediately.
    """
    code = (
        "import sys, json\n"
        "from vllm_omni.entrypoints.cli import serve\n"
        f"for world in {[str(null_world), str(lingbot_world)]!r}:\n"
        "    serve.plan([world, '--port', '0'], {}, [])\n"
        "print(json.dumps(sorted({'vllm', 'transformers', 'diffusers', 'torch._dynamo'} & "
        "set(sys.modules))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=seconds(300),
        check=True,
    )
    assert json.loads(result.stdout) == []


@pytest.mark.parametrize(
    "given", [("--api-key", "sesame", "street"), ("--api-key=sesame",), ("--api_key", "sesame")]
)
def test_the_printed_command_holds_no_key(world: str, given: tuple[str, ...]) -> None:
    """The server receives the API keys, but the printed command shows KEY in their place."""
    planned = plan(world, *given)
    assert "sesame" in " ".join(planned.argv)
    assert "sesame" not in planned.plain_command
    assert "street" not in planned.plain_command
    assert "KEY" in planned.plain_command


@pytest.mark.parametrize(
    ("given", "page"),
    [
        ((), "http://localhost:0/omni/"),
        (("--host", "0.0.0.0", "--root-path", "/gpu"), "http://localhost:0/gpu/omni/"),
        (("--host", "::1", "--ssl-certfile", __file__), "https://[::1]:0/omni/"),
        (("--uds", "world.sock"), None),
    ],
)
def test_the_address_of_the_page_is_planned(
    world: str, given: tuple[str, ...], page: str | None
) -> None:
    """The address of the web page is printed before the engine is started, because starting the
    engine takes a minute.
    """
    assert plan(world, *given).page == page


@pytest.mark.parametrize(
    ("environ", "timeout"),
    [
        ({}, "2"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "7"}, None),
        ({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "7"}, None),
    ],
)
def test_an_exit_does_not_wait_long_for_a_collector_that_is_down(
    environ: dict[str, str], timeout: str | None, world: str
) -> None:
    """If the trace collector is down, each remaining batch of spans delays the exit by at most two
    seconds, unless the operator has set another timeout.
    """
    planned = plan(world, "--otlp-traces-endpoint", "http://localhost:1", environ=environ)
    assert planned.environ.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT") == timeout
    assert "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT" not in plan(world).environ
