# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni replay` reproduces a recording identically, reports the chunk of any difference, and
reports wrong input in one line.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import lora_files
from helpers.quick_programs import run_python
from helpers.scheduling import new_request, run_to_end
from vllm.lora.request import LoRARequest

from vllm_omni.entrypoints.cli.main import main
from vllm_omni.inputs import DiffusionParams, Lora, UsedLoras
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.session_files.recording import (
    ChunkOutcome,
    LoraSettings,
    RecordedChunk,
    RecordingHeader,
    digest_of,
    read_recording,
    write_chunk,
    write_header,
)

OMNI = {"height": 32, "width": 48}
CHUNKS = 3


def record(path: Path, runner: Any, family: str, model: Path) -> Path:
    """Record three chunks on a runner in this process. The prompt changes at the last chunk."""
    image = torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)
    header = RecordingHeader(
        package_version="0.1.0",
        family=family,
        model=str(model),
        additional_config={"omni": {**OMNI, "record_dir": "recordings"}},
        dtype="bfloat16" if family == "lingbot_world" else "float32",
        enforce_eager=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )
    header = msgspec.structs.replace(
        header, dtype=str(runner.model_config.dtype).removeprefix("torch.")
    )
    with path.open("wb") as file:
        write_header(file, header)
        for index in range(CHUNKS):
            first: dict[str, Any] = {"prompt": "a harbour", "seed": 3} if index == 0 else {}
            later: dict[str, Any] = {"prompt": "at night"} if index == 2 else {}
            params = DiffusionParams(
                session_id="s", chunk_index=index, actions=[["w"], ["w", "j"], []], **first, **later
            )
            tensors = {"image": image} if index == 0 else {}
            fields = msgspec.structs.asdict(params)
            frames = run_to_end(runner, new_request("r", tensors, **fields))["r"][1][
                "frames"
            ].numpy()
            outcome = ChunkOutcome(
                chunk_index=index, digest=digest_of(frames), num_frames=len(frames)
            )
            write_chunk(
                file,
                RecordedChunk(params, {name: t.numpy() for name, t in tensors.items()}, outcome),
            )
    return path


def replay(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = ("-m", "vllm_omni.entrypoints.cli.main", "replay", *arguments)
    return run_python(*command, limit_s=300, environ={"VLLM_CPU_KVCACHE_SPACE": "1"})


def lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the output of the command without vLLM's lines."""
    return [
        line
        for line in result.stdout.splitlines()
        if line.startswith(("chunk", "identical", "DIFF", "wrote"))
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["lingbot_world", "null_world"])
def test_a_recording_replays_identically_and_a_difference_is_named(
    family: str, make_runner: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A replay is identical with the recorded model. With a changed digest or other weights, the
    command names the difference.
    """
    model = request.getfixturevalue(family)
    path = record(tmp_path / "walk.recording", make_runner(model), family, model)
    result = replay(path, "--out", tmp_path / "walk.mp4")
    assert result.returncode == 0, result.stderr[-2000:]
    assert lines(result)[:4] == [
        "chunk 0: 9 frames, identical",
        "chunk 1: 12 frames, identical",
        "chunk 2: 12 frames, identical",
        f"wrote {tmp_path / 'walk.mp4'}",
    ]
    assert (tmp_path / "walk.mp4").stat().st_size > 0
    header, chunks, _ = read_recording(path)
    with path.open("wb") as file:
        write_header(file, header)
        for chunk in chunks:
            assert chunk.outcome is not None
            wrong = msgspec.structs.replace(chunk.outcome, digest="0" * 32)
            write_chunk(
                file,
                chunk
                if chunk.outcome.chunk_index != 1
                else RecordedChunk(chunk.params, chunk.arrays, wrong),
            )
    result = replay(path)
    assert (result.returncode, lines(result)[-1]) == (1, "DIFFERENT from chunk 1 on")
    other = tmp_path / "other"
    get_family(family).make_tiny(other, 1, "original")
    result = replay(path, "--model", other)
    assert (result.returncode, lines(result)[-1]) == (1, "DIFFERENT from chunk 0 on")


INK = [Lora(name="ink", scale=0.5)]


def record_with_adapters(path: Path, runner: Any, model: Path) -> Path:
    """Record two chunks, of which the second uses an adapter."""
    config = runner.vllm_config.lora_config
    header = RecordingHeader(
        package_version="0.1.0",
        family="causal_wan",
        model=str(model),
        additional_config={"omni": OMNI},
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        lora=LoraSettings(
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
            max_cpu_loras=config.max_cpu_loras,
            lora_dtype=str(config.lora_dtype).removeprefix("torch."),
        ),
    )
    with path.open("wb") as file:
        write_header(file, header)
        for index, fields in enumerate(({"prompt": "a field", "seed": 3}, {"lora": INK})):
            params = DiffusionParams(session_id="s", chunk_index=index, **fields)  # type: ignore[arg-type]
            meta, tensors = run_to_end(
                runner, new_request("r", {}, **msgspec.structs.asdict(params))
            )["r"]
            frames = tensors["frames"].numpy()
            used = msgspec.convert(meta.get("lora", []), UsedLoras)
            outcome = ChunkOutcome(
                chunk_index=index, digest=digest_of(frames), num_frames=len(frames), lora=used
            )
            write_chunk(file, RecordedChunk(params, {}, outcome))
    return path


@pytest.mark.nightly
def test_a_recording_with_adapters_replays_with_the_same_and_with_no_others(
    make_runner: Any, causal_wan: Path, tmp_path: Path
) -> None:
    paths = [
        lora_files.write_causal_wan(causal_wan, tmp_path / f"{seed}.safetensors", seed)
        for seed in (1, 2)
    ]
    runner = make_runner(causal_wan, dtype="float32", enable_lora=True, max_lora_rank=8)
    assert runner.add_lora(LoRARequest("ink", 1, str(paths[0])))
    path = record_with_adapters(tmp_path / "walk.recording", runner, causal_wan)
    result = replay(path, "--lora-modules", f"ink={paths[0]}")
    assert result.returncode == 0, result.stderr[-2000:]
    assert lines(result) == [
        "chunk 0: 9 frames, identical",
        "chunk 1: 12 frames, identical",
        "identical: every frame is the recorded one",
    ]
    result = replay(path, "--lora-modules", f"ink={paths[1]}")
    assert result.returncode == 2
    assert re.search(
        r"chunk 1 was generated with other adapters: recorded 'ink' at 0.5, weights \w{32}; now ",
        result.stderr,
    )


def test_a_recording_names_the_adapters_it_needs(
    make_runner: Any, causal_wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run lists the adapters of a recording. A replay without these adapters is refused in
    one line before anything is loaded.
    """
    adapter = lora_files.write_causal_wan(causal_wan, tmp_path / "1.safetensors", 1)
    runner = make_runner(causal_wan, dtype="float32", enable_lora=True, max_lora_rank=8)
    assert runner.add_lora(LoRARequest("ink", 1, str(adapter)))
    path = record_with_adapters(tmp_path / "walk.recording", runner, causal_wan)
    (digest,) = (lora.digest for lora in read_recording(path)[1][1].outcome.lora)  # type: ignore[union-attr]
    capsys.readouterr()
    assert exit_code(path, "--dry-run") == 0
    assert f"with adapters 'ink' (weights {digest})" in capsys.readouterr().out
    for arguments, reason in (
        ([], f"adapters that are not given: 'ink' (weights {digest}); pass --lora-modules"),
        (["--lora-modules", "ink"], "takes NAME=PATH"),
        (["--lora-modules", "wool=there"], "adapters that are not given: 'ink'"),
    ):
        assert exit_code(path, *arguments) == 2
        assert reason in capsys.readouterr().err


def exit_code(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_file_and_the_model_are_checked_before_anything_heavy(
    make_runner: Any,
    null_world: Path,
    lingbot_world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dry run describes the recording. A missing file, a file of another kind, a missing model
    and a model of another family each give one line.
    """
    path = record(
        tmp_path / "walk.recording", make_runner(null_world), "null_world", tmp_path / "gone"
    )
    capsys.readouterr()
    assert exit_code(path, "--dry-run") == 0
    assert "walk.recording: 3 chunks of null_world" in capsys.readouterr().out
    (tmp_path / "text").write_text("hello")
    for arguments, reason in (
        ([tmp_path / "none"], "No such file"),
        ([tmp_path / "text"], "not a recording"),
        ([path], "pass --model"),
        ([path, "--model", tmp_path], "no checkpoint"),
        ([path, "--model", lingbot_world], "recorded with null_world"),
    ):
        assert exit_code(*arguments) == 2
        assert reason in capsys.readouterr().err
