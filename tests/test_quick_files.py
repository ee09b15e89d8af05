# SPDX-License-Identifier: Apache-2.0
"""Weight files that are remembered between tests are still what lies on the disk."""

import os
import time
from pathlib import Path

import pytest
import torch
from quick_files import SETTLED_S, remembering

from vllm_omni.model_executor.checkpoint.tensor_files import TorchSource, open_tensors


def write(path: Path, value: float, age_s: float = 2 * SETTLED_S) -> None:
    """A file of one tensor, written so long ago."""
    torch.save({"weight": torch.full((3,), value)}, path)
    written_s = time.time() - age_s
    os.utime(path, (written_s, written_s))


def value_in(path: Path) -> float:
    [(_, tensor)] = open_tensors(path).read_tensors(["weight"])
    return float(tensor[0])


def test_a_file_is_unpickled_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    opened: list[Path] = []

    def count(path: Path, state_keys: object) -> TorchSource:
        opened.append(path)
        return TorchSource(str(path), {}, {}, {})

    open_once = remembering(count)
    path = tmp_path / "model.pth"
    write(path, 1)
    assert open_once(path, ()) is open_once(path, ()) and len(opened) == 1
    assert open_once(path, ("model",)) is not open_once(path, ()) and len(opened) == 2
    write(path, 2, age_s=3 * SETTLED_S)
    assert open_once(path, ()) is open_once(path, ()) and len(opened) == 3


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    """Of the same size, in the same place, and perhaps within one tick of the clock."""
    path = tmp_path / "model.pth"
    for value in (1.0, 2.0, 3.0):
        write(path, value, age_s=0)
        assert value_in(path) == value


def test_tests_of_one_file_see_what_lies_there(tmp_path: Path) -> None:
    """By the suite's own: rewritten, and gone."""
    path = tmp_path / "model.pth"
    for value in (1.0, 2.0):
        write(path, value, age_s=(4 - value) * SETTLED_S)
        assert value_in(path) == value_in(path) == value
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.pth is not there"):
        value_in(path)
