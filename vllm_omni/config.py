# SPDX-License-Identifier: Apache-2.0
"""`OmniConfig`: everything a user may set under `--additional-config '{"omni": {...}}'`.

Parsed once in each process, frozen, and never written back. Unknown keys and values out of range are errors that list
the allowed values and near names. Options of one model live under `omni.model` and are parsed by that model's own
frozen dataclass.
Held by tests/test_config.py.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

import msgspec

DEFAULT_HEIGHT, DEFAULT_WIDTH = 480, 832
"""Of a video, in pixels, where neither the user nor the world or the model says another size."""
Positive = Annotated[int, msgspec.Meta(ge=1)]
Degradation = Literal["fewer_steps", "tiny_vae"]
T = TypeVar("T", bound=msgspec.Struct)


class OmniConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the diffusion worker, generic over models.

    height, width: the default and the largest request, in pixels (any height and width whose product is not larger).
    Where neither is given: the size in the world's card, else the one that the model was trained at, else 480x832.
    max_sessions: live sessions kept; one more is refused with `capacity`.
    max_session_bytes: bytes all sessions together may hold; None = the device's free memory after loading.
    session_idle_s: a session unused for this many seconds may be closed to make room.
    max_requests_per_step: requests that may take their denoise step in one engine step.
    batch_invariant: run those requests' forwards one by one, so that other sessions never change a session's result by
    a bit. False = one forward for all of equal shape: results then agree within float tolerance, and small
    models run faster (at thousands of tokens per request a forward is limited by arithmetic, not by its batch).
    overlap_decode: decode a finished chunk while its session's next one is denoised; the result comes with a later
    step. None = on CUDA with several ranks: on one GPU, which denoising fills, it gains 0.4 % and costs 3 GiB.
    vae_stage: the last of `--pipeline-parallel-size` stages holds no layer and decodes, beside the next chunk's steps
    on the others. pipeline_partition: layers of each stage that holds some; None = as even as possible, "measured" =
    such that the slowest stage, its decode included, is as fast as can be (measured at start).
    vae_parallel: the ranks of `--tensor-parallel-size` (Ulysses too) decode each frame together, a band of rows each.
    False = the first of them decodes alone, which keeps frames bit for bit those of one GPU.
    chunks_in_flight: chunks of one session that may be at work at once, each a step behind the one before it; for
    models whose chunks see earlier ones as noisy as themselves (docs/how_to/parallelism.md). pipeline: each stage
    of `--pipeline-parallel-size` owns `blocks` of the network's layers, or (`temporal`) one denoise step.
    scheduling: whose turn it is. `fifo`: in order of arrival, chunk after chunk. `deadline`: whose result is due first
    takes the next denoise step, in batches no larger than deadlines allow (docs/how_to/scheduling.md).
    target_fps: frames a second that realtime doors hold for a client who names no rate; a stream that cannot be held
    is refused with `capacity`. degradations: quality losses allowed for a chunk that would be late, cheapest first.
    snapshot_dir: where snapshots of sessions lie on their way to and from clients; every rank must see it. None = the
    system's directory for temporary files. record_dir: record every session of the realtime doors in this directory,
    for `vllm-omni replay`; None = nothing is recorded.
    rank_timeout_s: how long a process of the engine may be stopped (SIGSTOP), or one of several ranks silent (killed,
    stopped, cut off), until all of them end and the engine is reported dead; None = for as long as vLLM waits.
    drain_timeout_s: how long a server that is told to stop (SIGTERM) may finish the chunks in flight; 0 = stop at once.
    drain_snapshot_dir: it saves its sessions there, and a server that starts takes them over; None = they are lost.
    quotas: a TOML file with limits per API key (docs/how_to/operators.md); None = all keys share the capacity.
    checkpoint_s: also save there, every so many seconds, each session that has moved on, for a server that starts
    after a crash; less often if that would cost the engine more than 1.5 % of its time. None = only when told to stop.
    dequantize: read quantized weights back into `--dtype` while they are loaded; for a format the device cannot compute
    in (docs/how_to/quantization.md).
    max_hidden_states_bytes: rows one request of a language model may ask for. hidden_state_layers: those whose rows may
    be asked for, besides the last.
    model: options of the model itself.
    """

    height: Annotated[int, msgspec.Meta(ge=16, le=4096)] = DEFAULT_HEIGHT
    width: Annotated[int, msgspec.Meta(ge=16, le=4096)] = DEFAULT_WIDTH
    max_sessions: Positive = 8
    max_session_bytes: Positive | None = None
    session_idle_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    max_requests_per_step: Positive = 4
    batch_invariant: bool = True
    overlap_decode: bool | None = None
    vae_stage: bool = False
    pipeline_partition: tuple[Positive, ...] | Literal["measured"] | None = None
    vae_parallel: bool = False
    scheduling: Literal["fifo", "deadline"] = "fifo"
    target_fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    degradations: tuple[Degradation, ...] = ()
    chunks_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    pipeline: Literal["blocks", "temporal"] = "blocks"
    snapshot_dir: str | None = None
    record_dir: str | None = None
    rank_timeout_s: Annotated[float, msgspec.Meta(ge=2, le=3600)] | None = 6.0
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 25.0
    drain_snapshot_dir: str | None = None
    quotas: str | None = None
    checkpoint_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] | None = None
    dequantize: bool = False
    max_hidden_states_bytes: Positive = 256 << 20
    hidden_state_layers: tuple[Annotated[int, msgspec.Meta(ge=0, le=1024)], ...] = ()
    model: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scheduling == "fifo" and (self.target_fps is not None or self.degradations):
            raise ValueError("target_fps and degradations need scheduling 'deadline'")
        if self.checkpoint_s is not None and self.drain_snapshot_dir is None:
            raise ValueError("checkpoint_s needs drain_snapshot_dir: that is where checkpoints are kept")
        if len(set(self.degradations)) != len(self.degradations):
            raise ValueError(f"degradations must differ, got {list(self.degradations)}")
        if self.pipeline == "temporal" and self.pipeline_partition is not None:
            raise ValueError("pipeline 'temporal': every stage holds all layers, so there is no pipeline_partition")

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each stage as they are loaded; () = as even as possible."""
        return self.pipeline_partition if isinstance(self.pipeline_partition, tuple) else ()

    @property
    def ahead(self) -> str | None:
        """The option, as a user would name it, that lets a session's next chunk begin early; None = neither is set."""
        if self.pipeline == "temporal":
            return "pipeline 'temporal'"
        return f"chunks_in_flight {self.chunks_in_flight}" if self.chunks_in_flight > 1 else None

    @property
    def max_area(self) -> int:
        return self.height * self.width

    def check_stages(self, pipeline_parallel_size: int) -> None:
        """Raise ValueError, with the reason, unless the options fit a pipeline of so many stages."""
        if self.vae_stage and pipeline_parallel_size < 2:
            raise ValueError(
                "omni.vae_stage takes the last pipeline stage for the VAE: pass --pipeline-parallel-size 2 or more"
            )
        stages = pipeline_parallel_size - self.vae_stage
        if self.partition and len(self.partition) != stages:
            vae = ", one of them for the VAE" if self.vae_stage else ""
            raise ValueError(
                f"omni.pipeline_partition names {len(self.partition)} stages, {stages} hold layers "
                f"(--pipeline-parallel-size {pipeline_parallel_size}{vae})"
            )

    def check_ranks(self, tensor_parallel_size: int) -> None:
        """Raise ValueError, with the reason, unless the options fit so many ranks that share layers."""
        if self.vae_parallel and tensor_parallel_size < 2:
            raise ValueError(
                "omni.vae_parallel splits the VAE's decode over ranks that share layers: pass --tensor-parallel-size 2 "
                "or more (with omni.model.sequence_parallel for Ulysses)"
            )

    def refuse_chunks_in_flight(self, model: str) -> None:
        """Raise ValueError if chunks in flight are asked for, which `model` (its name for users) cannot have."""
        if self.ahead is not None:
            raise ValueError(
                f"omni.{self.ahead}: {model} cannot do that: its next chunk needs the one before it complete"
            )

    def refuse_degradations(self, model: str) -> None:
        """Raise ValueError if degradations are asked for of `model` (its name for users), which has none."""
        if self.degradations:
            raise ValueError(
                f"omni.degradations: {model} cannot do {self.degradations[0]!r}: it has one quality only; remove them"
            )

    def refuse_vae_parallel(self, model: str) -> None:
        """Raise ValueError if ranks are to share the decode of `model` (its name for users), which cannot be split."""
        if self.vae_parallel:
            raise ValueError(f"omni.vae_parallel: the decode of {model} cannot be split over ranks; remove it")

    def refuse_checkpoints(self, model: str) -> None:
        """Raise ValueError if checkpoints are asked for of `model` (its name for users), which keeps no sessions."""
        if self.checkpoint_s is not None:
            raise ValueError(f"omni.checkpoint_s: {model} has no sessions that outlive a request; remove it")

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "OmniConfig":
        """Parse `additional_config["omni"]` (missing = all defaults). Raises ValueError naming key and range.

        additional_config: vLLM's option as it is: a map, or None. vLLM hands it to the runner, to the model and to the
        scheduler, each by itself: those of one process get the same object for the same options.
        """
        omni = additional_config.get("omni", {}) if isinstance(additional_config, Mapping) else {}
        try:
            key = msgspec.msgpack.encode(omni, order="deterministic")
        except (TypeError, ValueError):  # holds a value that no option can have: parsing says which
            return parse_options(cls, omni, "additional_config['omni']")
        if key not in _PARSED:
            copy = msgspec.msgpack.decode(key)  # whoever gave the options may still change them
            _PARSED[key] = parse_options(cls, copy, "additional_config['omni']")
        return _PARSED[key]


_PARSED: dict[bytes, OmniConfig] = {}
"""Options of this process's engines, as MessagePack -> parsed options."""


def parse_options(cls: type[T], options: Mapping[str, Any], where: str) -> T:
    """Convert `options` into the Struct `cls`; raises ValueError with the value, the allowed ones and the place."""
    try:
        return msgspec.convert(dict(options), cls)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        names = [field.name for field in msgspec.structs.fields(cls)]
        more = _named_values(cls, str(error)) + _near_names(names, str(error))
        raise ValueError(f"{where}: {error}{more}; allowed keys: {', '.join(names)}") from error


def _near_names(names: list[str], error: str) -> str:
    """The options whose names are like that of an unknown one, as an addition to its error; "" if there are none."""
    unknown = re.search(r"unknown field `([^`]+)`\Z", error)
    near = get_close_matches(unknown[1], names) if unknown else []
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _named_values(cls: type[msgspec.Struct], error: str) -> str:
    """Allowed names of the field in an error message, as an addition to that message; "" if it takes no names."""
    place = re.search(r"`\$\.(\w+)(\[\d+\])?`\Z", error)
    field = next((field for field in msgspec.structs.fields(cls) if place and field.name == place[1]), None)
    if field is None:
        return ""
    kind = msgspec.inspect.type_info(field.type)
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    items = [kind.item_type if isinstance(kind, msgspec.inspect.VarTupleType) else kind for kind in kinds]
    values = [value for item in items if isinstance(item, msgspec.inspect.LiteralType) for value in item.values]
    return f"; allowed values: {', '.join(map(repr, values))}" if values else ""
