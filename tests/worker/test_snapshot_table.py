# SPDX-License-Identifier: Apache-2.0
"""The validation of a snapshot's tensor table is at least as strict as the safetensors library's.

This package reads the table with its own code rather than with the library.
"""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import (
    MAX_OBJECTS,
    MAX_TABLE_BYTES,
    ModelIdentity,
    OpenSnapshot,
    ParallelLayout,
    RankPart,
    SnapshotHeader,
    check_table,
    describe,
)
from vllm_omni.session_files.snapshot_writing import plan

_PART = RankPart(weights="w", scalars={})
_HEADER = SnapshotHeader(
    format_version=1,
    package_version="0",
    model=ModelIdentity(family="f", config="c", parallel=ParallelLayout(1, 1)),
    chunk_index=1,
    opening={},
    ranks=[_PART],
)


def ours(path: Path) -> bool:
    try:
        with OpenSnapshot.open(path) as snapshot:
            snapshot.rank(0, _PART)
    except RequestFailed:
        return False
    return True


def theirs(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            file.metadata()
    except SafetensorError:
        return False
    return True


@pytest.fixture(scope="module")
def whole() -> bytes:
    """A snapshot with metadata and three tensors, one of which is empty."""
    tensors = {
        "rank0.a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "rank0.b": torch.zeros(0, 2),
        "rank0.c": torch.ones(5, dtype=torch.int8),
    }
    header = msgspec.json.encode(_HEADER).decode()
    return save(tensors, {"kind": "vllm_omni.session", "omni_session": header})


def test_files_that_the_library_refuses_are_refused(whole: bytes, tmp_path: Path) -> None:
    """This package refuses every file that the safetensors library refuses.

    The test changes each byte of the table in turn, and truncates or extends the file.
    """
    path = tmp_path / "file"
    length = 8 + int.from_bytes(whole[:8], "little")
    damaged = [whole[:-3], whole[:-1], whole, whole + b"\0", whole + bytes(3)]
    for position in range(length):
        values = {whole[position] ^ 1, whole[position] ^ 128, *b'\0 "09:[]{}a'}
        damaged += [whole[:position] + bytes([value]) + whole[position + 1 :] for value in values]
    verdicts = set()
    for content in damaged:
        path.unlink(missing_ok=True)  # ext4 flushes a file that is truncated and rewritten
        path.write_bytes(content)
        verdict = (ours(path), theirs(path))
        assert verdict != (True, False), content
        verdicts.add(verdict)
    assert {(False, False), (True, True)} <= verdicts


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rank0.a", {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}),
        ("rank0.a", {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}),
        ("rank0.a", {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}),
        ("rank0.a", {"dtype": "F99", "shape": [2, 3], "data_offsets": [0, 24]}),
        ("rank0.a", {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 24]}),
        ("rank0.a", {"shape": [2, 3], "data_offsets": [0, 24]}),
        ("rank0.a", {}),
        ("rank0.b", {"dtype": "F32", "shape": [0, 2]}),
        ("rank0.b", {"dtype": "F99", "shape": [0, 2], "data_offsets": [24, 24]}),
        ("rank0.c", {"dtype": "I8", "shape": [5], "data_offsets": [23, 28]}),
        ("rank0.c", {"dtype": "I8", "shape": [5], "data_offsets": [-5, 0]}),
        ("rank0.c", {"dtype": "I8", "shape": [5], "data_offsets": [25, 30]}),
        ("rank0.c", {"dtype": "I8", "shape": [1 << 62], "data_offsets": [24, 24 + (1 << 62)]}),
        ("rank0.d", {"dtype": "I8", "shape": [5], "data_offsets": [24, 29]}),
    ],
)
def test_invalid_offsets_are_refused(
    whole: bytes, tmp_path: Path, name: str, entry: dict[str, object]
) -> None:
    """The library and this package both refuse shapes that do not match the byte count, unknown
    dtypes, missing fields and gaps.

    Both also refuse offsets that overlap or lie beyond the end of the file.
    """
    length = int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8 : 8 + length])
    table[name] = entry
    text = json.dumps(table).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    assert not theirs(tmp_path / "file")
    assert not ours(tmp_path / "file")


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(
            b"{%s}" % b",".join(b'"%x":{}' % n for n in range(MAX_OBJECTS)), id="entries of nothing"
        ),
        pytest.param(
            (
                b'{"__metadata__":{"kind":"vllm_omni.session","omni_session":'
                b'"{\\"format_version\\":'
                b'1,\\"ranks\\":[%s]}"}}'
            )
            % b",".join([rb"\u007b}"] * MAX_OBJECTS),
            id="a header of nothing",
        ),
        pytest.param(b"{}" + b" " * MAX_TABLE_BYTES, id="nothing at all"),
    ],
)
def test_a_large_table_is_refused_before_it_is_decoded(table: bytes, tmp_path: Path) -> None:
    """A large table is refused because of its size, before it is decoded."""
    (tmp_path / "file").write_bytes(len(table).to_bytes(8, "little") + table)
    with pytest.raises(
        RequestFailed, match=f"at most {MAX_OBJECTS}|at most {MAX_TABLE_BYTES}"
    ) as refused:
        check_table(tmp_path / "file")
    assert refused.value.code == "invalid_snapshot"


def test_a_session_that_could_not_be_read_is_not_saved() -> None:
    """A session with too many tensors or with tensor names that are too long is not saved, because
    its snapshot could not be read back.
    """
    for names in ([f"{n:x}" for n in range(MAX_OBJECTS)], ["x" * MAX_TABLE_BYTES]):
        tensors = {name: torch.zeros(0) for name in names}
        described = describe(_HEADER.model, "w", 1, {}, {}, tensors)
        with pytest.raises(RequestFailed) as refused:
            plan([described], "0", None)
        assert refused.value.code == "snapshot_too_large"
