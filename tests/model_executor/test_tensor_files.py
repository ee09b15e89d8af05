# SPDX-License-Identifier: Apache-2.0
"""Only plain dense tensors are read from untrusted weight files, and only from files inside the
folder. Any other content causes a one-line error.
"""

import contextlib
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_omni.model_executor.checkpoint.tensor_files import (
    AdaptedSource,
    UnmappedSource,
    confined,
    files_may_change,
    open_tensors,
    read_json,
    unchanged,
)

MARKER = "payload_ran"


class Payload:
    """An object whose unpickling would create the marker file."""

    def __reduce__(self):
        return (os.mkdir, (MARKER,))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_tensors(path)
    assert "\n" not in str(caught.value)


def index(folder: Path, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def test_a_pth_file_is_read(tmp_path):
    """Names, shapes, dtypes and values are read from a `.pth` file of plain tensors."""
    stored = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    torch.save(stored, tmp_path / "x.pth")
    source = open_tensors(tmp_path / "x.pth")
    assert source.shapes == {"a": (2, 3), "b": (4,)}
    assert source.dtypes == {"a": torch.float32, "b": torch.bfloat16}
    assert all(
        torch.equal(tensor, stored[name]) for name, tensor in source.read_tensors(["b", "a"])
    )


def test_tensors_may_be_adapted(tmp_path):
    """Tensors can be adapted while they are being read. For example, stacked tensors can be split
    or flattened. Only requested tensors are read.
    """
    stored = {
        "qkv": torch.arange(12.0).view(6, 2),
        "flat": torch.arange(3.0).view(1, 1, 3),
        "c": torch.ones(1, 2),
    }
    torch.save(stored | {"unread": torch.ones(1)}, tmp_path / "x.pth")
    forms = {
        "qkv": {kind: lambda x, i=i: x.tensor_split(3)[i] for i, kind in enumerate("qkv")},
        "flat": {"flat": torch.flatten},
        "c": {"c": unchanged},
        "unread": {},
    }
    source = AdaptedSource(open_tensors(tmp_path / "x.pth"), forms.__getitem__)
    assert source.shapes == {"q": (2, 2), "k": (2, 2), "v": (2, 2), "flat": (3,), "c": (1, 2)}
    assert set(source.dtypes) == set(source.shapes) and source.where == str(tmp_path / "x.pth")
    read = dict(source.read_tensors(["v", "flat", "c"]))
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        "v": [[8.0, 9.0], [10.0, 11.0]],
        "flat": [0.0, 1.0, 2.0],
        "c": [[1.0, 1.0]],
    }


def test_an_adaptation_that_does_not_fit_is_refused(tmp_path):
    """An adaptation is rejected if it gives two tensors the same name or does not fit a tensor's
    shape.
    """
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.pth")
    for form, message in (
        (unchanged, "holds 'c' twice, as 'a' and 'b'"),
        (lambda x: x[:, 0], r"'a' can not have"),
    ):
        with pytest.raises(ValueError, match=message):
            AdaptedSource(open_tensors(tmp_path / "x.pth"), lambda _, form=form: {"c": form})


def test_an_index_selects_the_files(tmp_path):
    """Only the files that the index names are read, so a stale shard next to them is ignored."""
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "old.safetensors")
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    source = open_tensors(tmp_path)
    assert source.shapes == {"a": (1,), "b": (2,)}
    assert {name: tensor.sum().item() for name, tensor in source.read_tensors(["a", "b"])} == {
        "a": 1.0,
        "b": 2.0,
    }


def test_without_an_index_the_same_tensor_in_two_files_is_refused(tmp_path):
    """If there is no index, a tensor that occurs in two files is ambiguous and therefore
    rejected.
    """
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "old.safetensors")
    refused(tmp_path, "'a' is in another file")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "x\0",
        "a\\b",
        "x" * 5000,
        "CON/../x",
    ],
)
def test_index_entries_that_are_no_plain_file_name_are_refused(tmp_path, name):
    """An index may name only files in its own folder."""
    (tmp_path / "inner").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    index(tmp_path / "inner", {"a": name})
    refused(tmp_path / "inner", "no plain file name")


def test_links_out_of_the_folder_are_refused(tmp_path):
    """A link to a file in another folder is rejected."""
    (tmp_path / "inner").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "inner" / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    refused(tmp_path / "inner", "link to a file outside")


def test_a_sibling_folder_with_the_same_prefix_is_outside(tmp_path):
    """`model-evil/` does not count as inside `model/`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model-evil").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "model-evil" / "x.safetensors")
    (tmp_path / "model" / "x.safetensors").symlink_to("../model-evil/x.safetensors")
    refused(tmp_path / "model", "link to a file outside")


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
    """Links from a Hugging Face snapshot folder to `blobs/` are followed."""
    snapshot = tmp_path / "models--x--y" / "snapshots" / "0123" / "transformer"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x--y" / "blobs").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "models--x--y" / "blobs" / "deadbeef")
    (snapshot / "x.safetensors").symlink_to("../../../blobs/deadbeef")
    assert open_tensors(snapshot).shapes == {"a": (1,)}


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_safetensors_are_refused(tmp_path, keep):
    """A truncated file, for example from an interrupted download, is rejected, and the message says
    to download the file again.
    """
    save_file({"a": torch.ones(100)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:keep])
    refused(tmp_path, "no complete safetensors file .*download it again")


@pytest.mark.parametrize(
    "header",
    [
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**62, 16], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}},
    ],
)
def test_invalid_safetensors_headers_are_refused(tmp_path, header):
    """Overlapping, oversized and reversed ranges, as well as unknown dtypes, are rejected before
    any tensor is created.
    """
    raw = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 12)
    refused(tmp_path, "no complete safetensors file")


def test_a_huge_header_is_refused(tmp_path):
    """A header that claims a length of 2^62 bytes is rejected, and no memory is allocated for
    it.
    """
    (tmp_path / "x.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    refused(tmp_path, "no complete safetensors file")


def test_integer_tensors_are_refused(tmp_path):
    """Integer tensors are rejected rather than cast."""
    save_file({"a": torch.ones(2, dtype=torch.int64)}, tmp_path / "x.safetensors")
    refused(tmp_path, "dtype I64; allowed: F32, F16, BF16, F8_E4M3, F8_E5M2, I8, U8")


@pytest.mark.parametrize("keep", [0, 10, 500, -30])
def test_truncated_pth_is_refused(tmp_path, keep):
    """A truncated `.pth` file is rejected with a one-line error."""
    torch.save({"a": torch.ones(1000)}, tmp_path / "x.pth")
    (tmp_path / "x.pth").write_bytes((tmp_path / "x.pth").read_bytes()[:keep])
    refused(tmp_path / "x.pth", "download it again")


def test_code_in_a_pth_does_not_run(tmp_path, monkeypatch):
    """A malicious pickle is rejected without being run, whether it is in a zip archive, by itself,
    or next to valid tensors.
    """
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Payload()}, tmp_path / "zip.pth")
    torch.save({"a": torch.ones(1), "b": Payload()}, tmp_path / "mixed.pth")
    (tmp_path / "bare.pth").write_bytes(pickle.dumps({"a": Payload()}))
    torch.save({"a": torch.ones(1)}, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    refused(tmp_path / "zip.pth", "holds more than tensors")
    refused(tmp_path / "mixed.pth", "holds more than tensors")
    refused(tmp_path / "bare.pth", "no PyTorch zip archive")
    refused(tmp_path / "legacy.pth", "no PyTorch zip archive")
    assert not Path(MARKER).exists()


def shared() -> dict[str, torch.Tensor]:
    tensor = torch.ones(64)
    return {"a": tensor, "b": tensor}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.eye(3).to_sparse()}, "sparse or quantised"),
        ({"a": torch.eye(3).to_sparse_csr()}, "sparse or quantised|holds more than tensors"),
        (
            {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
            "sparse or quantised|more than tensors",
        ),
        ({"a": torch.ones(1).expand(2**40)}, "claims more than it stores"),
        ({"a": torch.ones(4, 4).t()}, "claims more than it stores"),
        ({"a": torch.ones(2, device="meta")}, "no data"),
        ({"a": torch.ones(2, dtype=torch.int64)}, "dtype torch.int64"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "dtype torch.complex64"),
        ({"a": [torch.ones(2)]}, "is a list"),
        ({1: torch.ones(2)}, "dictionary of tensor name"),
        ([torch.ones(2)], "dictionary of tensor name"),
        (shared(), "share memory"),
    ],
)
def test_anything_but_plain_dense_float_tensors_is_refused(tmp_path, content, message):
    """Sparse, quantized, expanded, shared and non-float tensors, tensors without data, and objects
    other than tensors are rejected before their data is read.
    """
    torch.save(content, tmp_path / "x.pth")
    refused(tmp_path / "x.pth", message)


def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path):
    """A zip archive that starts like a checkpoint but contains something else is rejected."""
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "x.pth", "cannot be read")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_files_raise_only_valueerror(tmp_path, data):
    """Whichever bytes of a weight file are changed, reading it either succeeds or raises
    ValueError.
    """
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(8), "b": torch.zeros(3)}, buffer)
    save_file({"a": torch.ones(8)}, tmp_path / "good.safetensors")
    for name, good in (
        ("x.pth", buffer.getvalue()),
        ("y.safetensors", (tmp_path / "good.safetensors").read_bytes()),
    ):
        damaged = bytearray(good)
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path / name
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(ValueError):
            source = open_tensors(path)
            for _, tensor in source.read_tensors(list(source.shapes)):
                assert tensor.numel() < 1000


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_files_that_are_no_json_object_are_refused(tmp_path, text):
    """If a config or index is not a JSON object, a one-line error names the file."""
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_missing_file_is_named(tmp_path):
    """The error names the missing file, for example a shard that is listed in the index but was not
    downloaded.
    """
    index(tmp_path, {"a": "model-1.safetensors"})
    refused(tmp_path, r"model-1\.safetensors is not there")
    with pytest.raises(ValueError, match="is not there"):
        confined(tmp_path, "nothing")


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_unmapped_reading_equals_the_library(tmp_path, data):
    """This reader applies the safetensors library's header rules, so for every file that the
    library accepts, both produce the same tensors. If only the library rejects a damaged file, this
    reader never reads more bytes than the file has.
    """
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(()),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"of": "a test"})
    damaged = bytearray((tmp_path / "x.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.safetensors").write_bytes(
        bytes(damaged)[: data.draw(st.integers(0, len(damaged)))]
    )
    try:
        expected = open_tensors(tmp_path / "x.safetensors")
    except ValueError:
        # Only the library rejects some kinds of damage, for example a name that is not UTF-8.
        with contextlib.suppress(ValueError):
            found = UnmappedSource.open(tmp_path / "x.safetensors")
            assert sum(tensor.nbytes for _, tensor in found.read_tensors(found.shapes)) <= len(
                damaged
            )
        return
    found = UnmappedSource.open(tmp_path / "x.safetensors")
    assert found.shapes == expected.shapes and found.dtypes == expected.dtypes
    read = dict(expected.read_tensors(expected.shapes))
    assert all(
        torch.equal(tensor.view(-1).view(torch.uint8), read[name].view(-1).view(torch.uint8))
        for name, tensor in found.read_tensors(found.shapes)
    )


@pytest.mark.parametrize("change", ["truncated", "rewritten", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, change):
    """A file is rejected if it changes after its header and before its last tensor has been read.
    The file is never memory-mapped.
    """
    path, other = tmp_path / "x.safetensors", tmp_path / "other"
    for position in (path, other):
        save_file({"a": torch.ones(5000), "b": torch.ones(5000)}, position)
    source = UnmappedSource.open(path)
    reading = source.read_tensors(["a", "b"])
    next(reading)
    assert str(path) not in Path("/proc/self/maps").read_text()
    data = path.read_bytes()
    if change == "replaced":
        other.replace(path)
    else:
        with path.open("r+b") as file:
            file.truncate(100)
            file.write(data if change == "rewritten" else b"")
    with pytest.raises(ValueError, match=r"was changed while it was read|cannot be read"):
        list(reading)


@pytest.mark.parametrize("cut", [0, 4000])
def test_a_file_truncated_while_it_is_read_is_refused(tmp_path: Path, cut: int) -> None:
    """A file that is truncated while it is being read is rejected. If the file were memory-mapped,
    the process would be killed.
    """
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1 << 10), "b": torch.ones(1 << 20)}, path)
    with files_may_change():
        tensors = open_tensors(path).read_tensors(["a", "b"])
        assert torch.equal(next(tensors)[1], torch.ones(1 << 10))
        os.truncate(path, cut)
        with pytest.raises(ValueError, match=r"cannot be read|was changed while it was read"):
            next(tensors)


def test_a_file_replaced_before_its_data_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(8)}, path)
    with files_may_change():
        source = open_tensors(path)
        save_file({"a": torch.ones(9)}, path)
        with pytest.raises(ValueError, match="was changed while it was read"):
            list(source.read_tensors(["a"]))


def test_an_archive_is_read_completely_while_serving(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(1 << 20)}, path)
    with files_may_change():
        source = open_tensors(path)
        os.truncate(path, 0)
        ((_, tensor),) = source.read_tensors(["a"])
    assert torch.equal(tensor, torch.ones(1 << 20))
