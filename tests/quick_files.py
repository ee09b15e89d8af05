# SPDX-License-Identifier: Apache-2.0
"""A weight file of torch's is unpickled once in a process of the suite, however many models are
loaded from it.

torch's safe unpickler is written in Python: for the five times that a tiny Wan checkpoint's files
are opened it took half of the seconds of a load. What is remembered is what `open_tensors` makes of
a file that is still the same one, its tensors mapped from it; loading copies from them. Processes
that tests start read their files as ever.
Held by test_quick_files.py.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest

from vllm_omni.model_executor.checkpoint import tensor_files
from vllm_omni.model_executor.checkpoint.tensor_files import TorchSource

REMEMBERED = 64
SETTLED_S = 0.1
"""A file that was written more recently is read: clocks of file systems have ticks, in which it
could change again.
"""

Open = Callable[[Path, Sequence[str]], TorchSource]


def remembering(open_file: Open) -> Open:
    """`open_file`, called once for each file, and again when that has changed.

    Errors are not remembered.
    """

    @lru_cache(REMEMBERED)
    def remembered(path: Path, state_keys: tuple[str, ...], *identity: int) -> TorchSource:
        return open_file(path, state_keys)

    def open_or_recall(path: Path, state_keys: Sequence[str]) -> TorchSource:
        state = path.stat()
        if time.time() - state.st_mtime < SETTLED_S:
            return open_file(path, state_keys)
        return remembered(
            path, tuple(state_keys), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        )

    return open_or_recall


@pytest.fixture(scope="session", autouse=True)
def _weight_files_are_unpickled_once() -> Iterator[None]:
    with mock.patch.object(tensor_files, "_open_torch", remembering(tensor_files._open_torch)):
        yield
