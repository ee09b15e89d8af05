# SPDX-License-Identifier: Apache-2.0
"""`OmniConfig`: the options in `--additional-config '{"omni": {...}}'`.

The options are parsed once per process and never change afterwards. If a key is unknown or a value
is out of range, the error lists the allowed values and similar names. Model-specific options are
set under `omni.model` and parsed into the model's own frozen dataclass.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

import msgspec

DEFAULT_HEIGHT, DEFAULT_WIDTH = 480, 832
"""Height and width of a video in pixels if the user, the world description and the model specify no
size.
"""
SERVER_NAME = r"^[A-Za-z0-9-]{1,63}\Z"
"""Pattern that a server name must match. Server names follow the rules for host names, so URLs and
ids need no quoting.
"""
Positive = Annotated[int, msgspec.Meta(ge=1)]
Degradation = Literal["fewer_steps", "tiny_vae"]
T = TypeVar("T", bound=msgspec.Struct)


class OmniConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Diffusion worker options shared by all models."""

    height: Annotated[int, msgspec.Meta(ge=16, le=4096)] = DEFAULT_HEIGHT
    """Default height of a video in pixels. `height * width` is also the maximum number of pixels
    per frame that a request may use. Default: the size in the world description if there is one,
    otherwise the size at which the model was trained, otherwise 480x832.
    """
    width: Annotated[int, msgspec.Meta(ge=16, le=4096)] = DEFAULT_WIDTH
    """Default width of a video in pixels; see `height`."""
    max_sessions: Positive = 8
    """Maximum number of live sessions per engine. Further sessions are refused with `capacity`."""
    max_session_bytes: Positive | None = None
    """Maximum total memory of all sessions, in bytes. Default: the device memory that is free after
    the model has been loaded.
    """
    kv_growth: bool = False
    """Allocate a session's K/V window gradually as it fills, and count only the allocated memory
    against the limits. More sessions then fit in memory as long as some of them are short. If no
    memory is left when a window must grow, the session continues with its current window, and its
    results report the `short_window` degradation (docs/how_to/serving.md). If false, every session
    is counted with a full window from the start. Requires a single pipeline stage and a model whose
    sessions can choose their window.
    """
    session_idle_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Seconds without a request after which a session may be closed to make room for another."""
    suspend_idle_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    """Seconds without a request after which a session may be suspended to host memory if another
    session needs its device memory. A suspended session moves back to the device before its next
    chunk, so `max_sessions` may exceed the number of sessions that fit on the device. Requires a
    single rank. Default: sessions stay on the device.
    """
    max_suspended_bytes: Positive = 16 << 30
    """Maximum total size of all suspended sessions in host memory, in bytes. Only used with
    `suspend_idle_s`.
    """
    suspend_dir: str | None = None
    """Directory on disk for suspended sessions that do not fit within `max_suspended_bytes`. The
    sessions that have been idle longest are written to disk first. A session on disk is loaded back
    before its next chunk. The directory appears empty because the files have no directory entries.
    The operating system deletes the files when the process ends. Requires `suspend_idle_s`.
    Default: suspended sessions stay in host memory.
    """
    max_requests_per_step: Positive = 4
    """Maximum number of requests that run a denoise step in one engine step."""
    batch_invariant: bool = True
    """Run one forward pass per request, so a session's results are bit-identical regardless of the
    other sessions in the batch. If false, requests of the same shape share a forward pass: small
    models run faster, and results agree within floating-point tolerance. Models with thousands of
    tokens per request gain little from sharing, because they are compute-bound.
    """
    overlap_decode: bool | None = None
    """Decode a finished chunk while the session's next chunk is being denoised. A later engine step
    returns the decoded chunk. Default: true on CUDA with several ranks. On a single GPU, the
    default is false, because denoising already saturates the GPU: overlapping would save little
    time, and the second chunk would need additional memory.
    """
    vae_stage: bool = False
    """Reserve the last of the `--pipeline-parallel-size` stages for the VAE. The VAE stage runs no
    transformer layers. It decodes a chunk while the other stages denoise the next one.
    """
    pipeline_partition: tuple[Positive, ...] | Literal["measured"] | None = None
    """Number of transformer layers in each pipeline stage, excluding a VAE stage. With `measured`,
    the engine times the layers and the decode at startup and minimizes the slowest stage's time.
    Default: layers are distributed as evenly as possible.
    """
    vae_parallel: bool = False
    """Split the decode of each frame into horizontal bands, one per rank of
    `--tensor-parallel-size` (Ulysses ranks included). If false, only the first rank decodes, and
    frames are bit-identical to those of a single GPU.
    """
    scheduling: Literal["fifo", "deadline"] = "fifo"
    """Scheduling policy. `fifo` runs chunks in order of arrival. `deadline` runs requests in
    deadline order, one denoise step at a time, and limits the batch size so that deadlines are met
    (docs/how_to/scheduling.md).
    """
    target_fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    """Frame rate, in frames per second, that the realtime endpoints use for clients that do not
    request one. A stream whose rate cannot be sustained is refused with `capacity`. Default: no
    target. Requires `scheduling` to be `deadline`.
    """
    degradations: tuple[Degradation, ...] = ()
    """Quality reductions allowed for a chunk that would otherwise miss its deadline. The reductions
    are applied in the given order, so list the one with the smallest quality loss first. Requires
    `scheduling` to be `deadline`.
    """
    chunks_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Maximum number of chunks in flight per session. Each chunk runs one denoise step behind its
    predecessor. Requires a model with a noise-matched K/V cache, in which a chunk attends to
    earlier chunks at its own noise level (docs/how_to/parallelism.md).
    """
    pipeline: Literal["blocks", "temporal"] = "blocks"
    """How `--pipeline-parallel-size` divides the work. With `blocks`, each stage runs some of the
    transformer's layers. With `temporal`, each stage runs all layers for one of the denoise steps.
    """
    snapshot_dir: str | None = None
    """Directory for session snapshots being sent to or received from clients. Every rank must be
    able to read and write it. Default: the system's temporary directory.
    """
    record_dir: str | None = None
    """Directory in which every realtime session is recorded. `vllm-omni replay` replays the
    recordings. Default: sessions are not recorded.
    """
    rank_timeout_s: Annotated[float, msgspec.Meta(ge=2, le=3600)] | None = 6.0
    """Time in seconds for which an engine process may be stopped, or a rank may be silent, before
    the engine is reported dead and all its processes exit. The timeout detects a stopped process
    (SIGSTOP) and, with several ranks, a rank that was killed or lost its network connection. If
    null, stopped processes are not detected and ranks do not monitor each other; the other checks
    in docs/how_to/operations.md (section "Who watches whom") remain active.
    """
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 25.0
    """Maximum time in seconds that a server spends finishing the chunks in flight after SIGTERM. If
    0, the server stops immediately.
    """
    drain_snapshot_dir: str | None = None
    """Directory for session snapshots written at shutdown and restored at the next start. Default:
    sessions are discarded.
    """
    quotas: str | None = None
    """Path of a TOML file with limits per API key (docs/how_to/operators.md). Default: all API keys
    share the server's capacity.
    """
    server_name: Annotated[str, msgspec.Meta(pattern=SERVER_NAME)] | None = None
    """Name of this server behind a reverse proxy: up to 63 letters, digits and hyphens. Ids that
    are valid on only one server, such as video ids, contain this name so that the proxy can route
    requests (docs/how_to/data_parallel.md). Default: ids do not contain a server name.
    """
    fleet: str | None = None
    """Path of a TOML file that lists the servers between which sessions may move
    (docs/how_to/fleet.md). Requires `server_name` and the `VLLM_OMNI_OPERATOR_KEY` environment
    variable. Default: sessions do not move.
    """
    snapshot_period_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] | None = None
    """Interval in seconds at which each session that has changed is saved to a periodic snapshot. A
    server that restarts after a crash restores its sessions from these snapshots. The interval
    grows if snapshots would take more than 1.5 % of the engine's time. Requires
    `drain_snapshot_dir`. Default: sessions are saved only at shutdown.
    """
    dequantize: bool = False
    """Convert quantized weights to `--dtype` while loading them. Use this option for a quantization
    format that the device does not support (docs/how_to/quantization.md).
    """
    max_hidden_states_bytes: Positive = 256 << 20
    """Maximum size, in bytes, of the hidden states that one request to a language model may return.
    """
    hidden_state_layers: tuple[Annotated[int, msgspec.Meta(ge=0, le=1024)], ...] = ()
    """Layers whose hidden states clients may request, in addition to the last one."""
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    """Model-specific options. Each model family defines its own."""

    def __post_init__(self) -> None:
        if self.scheduling == "fifo" and (self.target_fps is not None or self.degradations):
            raise ValueError("target_fps and degradations require scheduling 'deadline'")
        if self.snapshot_period_s is not None and self.drain_snapshot_dir is None:
            raise ValueError("snapshot_period_s requires drain_snapshot_dir, where snapshots go")
        if self.suspend_dir is not None and self.suspend_idle_s is None:
            raise ValueError("suspend_dir requires suspend_idle_s, which suspends sessions")
        if self.suspend_idle_s is not None and self.kv_growth:
            raise ValueError("suspend_idle_s: windows that grow (kv_growth) cannot be suspended")
        if self.fleet is not None and self.server_name is None:
            raise ValueError("fleet requires server_name, the name of this server in its file")
        if len(set(self.degradations)) != len(self.degradations):
            raise ValueError(f"degradations must differ, got {list(self.degradations)}")
        if self.pipeline == "temporal" and self.pipeline_partition is not None:
            raise ValueError(
                "pipeline 'temporal': every stage holds all layers, so there is no "
                "pipeline_partition"
            )

    @property
    def partition(self) -> tuple[int, ...]:
        """Number of layers in each stage at load time. The tuple is empty if `pipeline_partition`
        contains no numbers. Layers are then distributed as evenly as possible.
        """
        return self.pipeline_partition if isinstance(self.pipeline_partition, tuple) else ()

    @property
    def ahead(self) -> str | None:
        """The option, as a user would write it, that starts a session's next chunk before the
        current chunk has finished.

        None if no option starts the next chunk early.
        """
        if self.pipeline == "temporal":
            return "pipeline 'temporal'"
        return f"chunks_in_flight {self.chunks_in_flight}" if self.chunks_in_flight > 1 else None

    @property
    def max_area(self) -> int:
        return self.height * self.width

    def check_stages(self, pipeline_parallel_size: int) -> None:
        """Check that the options are valid for a pipeline of `pipeline_parallel_size` stages.

        Raises:
            ValueError: The options are not valid; the message gives the reason.
        """
        if self.vae_stage and pipeline_parallel_size < 2:
            raise ValueError(
                "omni.vae_stage reserves the last pipeline stage for the VAE: pass "
                "--pipeline-parallel-size 2 or more"
            )
        if self.suspend_idle_s is not None and pipeline_parallel_size > 1:
            raise ValueError(
                "omni.suspend_idle_s requires a single rank, because the clocks of ranks differ: "
                f"remove the option, or --pipeline-parallel-size {pipeline_parallel_size}"
            )
        if self.kv_growth and pipeline_parallel_size > 1:
            raise ValueError(
                "omni.kv_growth: the stages of a pipeline cannot agree on the length of a window: "
                "remove the option, or use --tensor-parallel-size instead of "
                f"--pipeline-parallel-size {pipeline_parallel_size}"
            )
        stages = pipeline_parallel_size - self.vae_stage
        if self.partition and len(self.partition) != stages:
            vae = ", one of them for the VAE" if self.vae_stage else ""
            raise ValueError(
                f"omni.pipeline_partition lists {len(self.partition)} stages, but {stages} "
                "hold layers "
                f"(--pipeline-parallel-size {pipeline_parallel_size}{vae})"
            )

    def check_ranks(self, tensor_parallel_size: int) -> None:
        """Check that the options are valid for `tensor_parallel_size` ranks that share layers.

        Raises:
            ValueError: The options are not valid; the message gives the reason.
        """
        if self.suspend_idle_s is not None and tensor_parallel_size > 1:
            raise ValueError(
                "omni.suspend_idle_s requires a single rank, because the clocks of ranks differ: "
                f"remove the option, or --tensor-parallel-size {tensor_parallel_size}"
            )
        if self.vae_parallel and tensor_parallel_size < 2:
            raise ValueError(
                "omni.vae_parallel splits the VAE's decode over the ranks that share layers: pass "
                "--tensor-parallel-size 2 or more (with omni.model.sequence_parallel for Ulysses)"
            )

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "OmniConfig":
        """Parse `additional_config["omni"]`. If the `omni` key is missing, all options have their
        defaults.

        Args:
            additional_config: vLLM's `--additional-config` option: a mapping or None. vLLM passes
                it to the runner, the model and the scheduler separately. The parsed options are
                cached, so all three share one object per process.

        Raises:
            ValueError: An option is unknown or out of range. The message names the option and the
                allowed values.
        """
        omni = additional_config.get("omni", {}) if isinstance(additional_config, Mapping) else {}
        try:
            key = msgspec.msgpack.encode(omni, order="deterministic")
        except (TypeError, ValueError):  # an unsupported type, which the parser's error names
            return parse_options(cls, omni, "additional_config['omni']")
        if key not in _PARSED:
            copy = msgspec.msgpack.decode(key)  # because the caller may modify its own object later
            _PARSED[key] = parse_options(cls, copy, "additional_config['omni']")
        return _PARSED[key]


_PARSED: dict[bytes, OmniConfig] = {}
"""This process's cache of parsed options. The keys are the unparsed options, encoded as
MessagePack.
"""


def parse_options(cls: type[T], options: Mapping[str, Any], where: str) -> T:
    """Convert `options` into the Struct `cls`.

    Args:
        cls: Struct type that declares the options.
        options: Values by option name.
        where: Source of the options, for error messages.

    Raises:
        ValueError: An option is invalid. The message contains the rejected value, the allowed
            values and `where`.
    """
    try:
        return msgspec.convert(dict(options), cls)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        names = [field.name for field in msgspec.structs.fields(cls)]
        more = _named_values(cls, str(error)) + _near_names(names, str(error))
        raise ValueError(f"{where}: {error}{more}; allowed keys: {', '.join(names)}") from error


def _near_names(names: list[str], error: str) -> str:
    """Return a suffix that suggests similar names for an unknown option, or "" if there are
    none.
    """
    unknown = re.search(r"unknown field `([^`]+)`\Z", error)
    near = get_close_matches(unknown[1], names) if unknown else []
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _named_values(cls: type[msgspec.Struct], error: str) -> str:
    """Return a suffix that lists the allowed values of the rejected field, or "" if the field is
    not restricted to named values.
    """
    position = re.search(r"`\$\.(\w+)(\[\d+\])?`\Z", error)
    field = next(
        (field for field in msgspec.structs.fields(cls) if position and field.name == position[1]),
        None,
    )
    if field is None:
        return ""
    kind = msgspec.inspect.type_info(field.type)
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    items = [
        kind.item_type if isinstance(kind, msgspec.inspect.VarTupleType) else kind for kind in kinds
    ]
    values = [
        value
        for item in items
        if isinstance(item, msgspec.inspect.LiteralType)
        for value in item.values
    ]
    return f"; allowed values: {', '.join(map(repr, values))}" if values else ""
