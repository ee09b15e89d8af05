# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni replay FILE`: run a recorded session again and compare its frames with the recorded
digests.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import check_file
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.platforms import is_cpu_build

if TYPE_CHECKING:
    from vllm_omni.inputs import UsedLora
    from vllm_omni.session_files.recording import RecordedChunk, RecordingHeader

_NOT_FOR_REPLAY = ("record_dir", "drain_snapshot_dir", "snapshot_dir")


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "replay",
        "run a recorded session again and compare its frames",
        (
            "Run the requests of a recorded session again, offline, and compare every frame with "
            "the recorded digest. The exit status is 1 if a frame differs. A server writes "
            "recordings with the option `omni.record_dir`."
        ),
        [
            "vllm-omni replay recordings/walk.recording",
            "vllm-omni replay recordings/walk.recording --model my_world --out walk.mp4",
        ],
    )
    parser.add_argument("file", type=Path, help="a recording (omni.record_dir)")
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory (default: the one that was recorded)"
    )
    parser.add_argument("--tensor-parallel-size", type=int, help="default: as recorded")
    parser.add_argument("--pipeline-parallel-size", type=int, help="default: as recorded")
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="the adapters that the recording used",
    )
    parser.add_argument("--out", type=Path, help="write the frames to this .mp4")
    parser.add_argument(
        "--dry-run", action="store_true", help="only read the file and print a summary of it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0 if all frames are identical to the recorded ones, or 1 if a chunk differs. The first
    difference is printed.
    """
    from vllm_omni.session_files.recording import committed_chunks, read_recording

    try:
        header, requests, whole = read_recording(args.file)
        chunks = list(committed_chunks(requests))
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    if not chunks:
        raise CommandError(f"{args.file} contains no finished chunk")
    if not whole:
        print("the recording ends within a chunk, which is ignored (was the server killed?)")
    print(
        f"{args.file.name}: {len(chunks)} chunks of {header.family}, recorded by vllm_omni "
        f"{header.package_version}"
    )
    needed = _adapters_in(chunks)
    if needed:
        print("with adapters " + ", ".join(f"{name!r}{of}" for name, of in needed.items()))
    if args.dry_run:
        return 0
    if args.out is not None:
        check_file("--out", args.out)
    adapters = _adapters(args.lora_modules, needed, header)
    model = _model(args.model, header)
    frames: list[Any] | None = None if args.out is None else []
    differs = _replay(model, header, chunks, adapters, args, frames)
    if frames:
        _write_video(args.out, frames)
    if differs is None:
        print("identical: every frame is the recorded one")
    else:
        print(f"DIFFERENT from chunk {differs} on")
    return 0 if differs is None else 1


def _model(wanted: Path | None, header: "RecordingHeader") -> Path:
    from vllm_omni.model_executor.models.registry import detect_family

    model = wanted or Path(header.model)
    if not model.is_dir():
        raise CommandError(f"the model's directory {model} does not exist: pass --model DIR")
    try:
        family = detect_family(model)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if family.name != header.family:
        raise CommandError(
            f"{model} is {family.name}, the session was recorded with {header.family}"
        )
    return model


def _adapters_in(chunks: "list[tuple[int, RecordedChunk]]") -> dict[str, str]:
    """Return the names of the adapters that a recording uses, with the digests of their weights if
    known.
    """
    named = {lora.name: "" for _, chunk in chunks for lora in chunk.params.lora or ()}
    used = {
        lora.name: lora.digest
        for _, chunk in chunks
        if chunk.outcome is not None
        for lora in chunk.outcome.lora
    }
    return {
        name: f" (weights {used[name]})" if name in used else ""
        for name in sorted(named.keys() | used.keys())
    }


def _adapters(
    modules: list[str], needed: dict[str, str], header: "RecordingHeader"
) -> dict[str, str]:
    """Return the adapter paths from `--lora-modules`, by adapter name.

    Raises:
        CommandError: An argument is malformed, an adapter that the recording used is missing, or
            adapters are given although the recorded server ran without `--enable-lora`.
    """
    given = dict(module.split("=", 1) for module in modules if "=" in module)
    if len(given) < len(modules):
        raise CommandError(
            f"--lora-modules takes NAME=PATH, each name once, got {' '.join(modules)}"
        )
    if missing := [f"{name!r}{of}" for name, of in needed.items() if name not in given]:
        raise CommandError(
            f"the recording uses adapters that are not given: {', '.join(missing)}; pass "
            "--lora-modules"
        )
    if given and header.lora is None:
        raise CommandError("--lora-modules: the recorded server ran without --enable-lora; drop it")
    return given


def _replay(
    model: Path,
    header: "RecordingHeader",
    chunks: "list[tuple[int, RecordedChunk]]",
    adapters: dict[str, str],
    args: argparse.Namespace,
    frames: list[Any] | None,
) -> int | None:
    """Replay the chunks on a new engine. Unless frames are requested, replay stops at the first
    chunk that differs from the recording.

    Returns:
        The index of the first chunk that differs, or None if all chunks are identical to the
        recorded ones.
    """
    from vllm_omni.outputs import RequestFailed

    if is_cpu_build():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    omni = {
        k: v
        for k, v in header.additional_config.get("omni", {}).items()
        if k not in _NOT_FOR_REPLAY
    }
    dtype: Any = header.dtype
    llm = LLM(
        model=str(model),
        config_format="omni",
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=header.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size or header.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size or header.pipeline_parallel_size,
        additional_config={**header.additional_config, "omni": omni},
        **_precision(header),
    )
    differs: int | None = None
    try:
        _load(llm, adapters)
        for index, chunk in chunks:
            try:
                made, used = _run_chunk(llm, index, chunk)
            except RequestFailed as failure:
                raise CommandError(f"chunk {index} was refused: {failure}") from failure
            _check_adapters(index, chunk, used)
            if frames is not None:
                frames.append(made)
            if not _report(index, chunk, made) and differs is None:
                differs = index
                if frames is None:
                    break
    finally:
        llm.llm_engine.engine_core.shutdown()
    return differs


def _precision(header: "RecordingHeader") -> dict[str, Any]:
    """Return the engine arguments for the recorded precision of the weights, K/V cache and
    adapters.
    """
    import msgspec
    import torch

    lora: dict[str, Any] = {}
    if header.lora is not None:
        # vLLM accepts only 16-bit types by name, so pass the dtype itself.
        dtype = getattr(torch, header.lora.lora_dtype)
        lora = {**msgspec.structs.asdict(header.lora), "lora_dtype": dtype, "enable_lora": True}
    return {"quantization": header.quantization, "kv_cache_dtype": header.kv_cache_dtype, **lora}


def _load(llm: Any, adapters: dict[str, str]) -> None:
    from vllm.lora.request import LoRARequest

    for number, (name, path) in enumerate(adapters.items(), start=1):
        try:
            llm.llm_engine.add_lora(LoRARequest(name, number, path))
        except Exception as error:  # the executor may convert the worker's ValueError to any type
            raise CommandError(f"adapter {name!r} cannot be loaded: {error}") from error


def _check_adapters(index: int, chunk: "RecordedChunk", used: "list[UsedLora]") -> None:
    if chunk.outcome is None or used == chunk.outcome.lora:
        return
    recorded, here = (
        ", ".join(f"{lora.name!r} at {lora.scale:g}, weights {lora.digest}" for lora in loras)
        or "none"
        for loras in (chunk.outcome.lora, used)
    )
    raise CommandError(
        f"chunk {index} was generated with other adapters: recorded {recorded}; now {here}"
    )


def _run_chunk(llm: Any, index: int, chunk: "RecordedChunk") -> "tuple[Any, list[UsedLora]]":
    """Generate one chunk, and return its frames and the adapters applied."""
    import msgspec
    import torch

    from vllm_omni.inputs import UsedLoras, engine_prompt
    from vllm_omni.outputs import unpack

    params = msgspec.structs.replace(chunk.params, chunk_index=index)
    tensors = {name: torch.from_numpy(array) for name, array in chunk.arrays.items()}
    pooling_params = params.to_pooling_params(tensors)
    (output,) = llm.encode(engine_prompt(), pooling_params, pooling_task="plugin", use_tqdm=False)
    meta, made = unpack(output.outputs.data)
    return made["frames"].numpy(), msgspec.convert(meta.get("lora", []), UsedLoras)


def _report(index: int, chunk: "RecordedChunk", frames_THWC: Any) -> bool:
    """Print a line about one chunk. Return False if its frames differ from the recorded digest."""
    from vllm_omni.session_files.recording import digest_of

    if chunk.outcome is None:
        print(
            f"chunk {index}: {len(frames_THWC)} frames, finished after it was cancelled: no digest "
            "to compare with"
        )
        return True
    same = digest_of(frames_THWC) == chunk.outcome.digest
    print(
        f"chunk {index}: {len(frames_THWC)} frames, {'identical' if same else 'DIFFERENT'}",
        flush=True,
    )
    return same


def _write_video(out: Path, frames: list[Any]) -> None:
    import numpy as np

    from vllm_omni.entrypoints.media.mp4 import encode_mp4

    video = encode_mp4(np.concatenate(frames), 16.0)
    try:
        out.write_bytes(video)
    except OSError as error:  # for example, the disk is full
        raise CommandError(f"--out {out} cannot be written: {error.strerror}") from error
    print(f"wrote {out}")
