# SPDX-License-Identifier: Apache-2.0
"""`CpuThreads`: torch's threads on a CPU belong to the lanes, where pipelines run, and not to the engine's own thread.

OpenMP keeps a pool of workers for every thread that ever ran a parallel region, and GNU's makes all of them sleep
sooner as soon as there are more threads than processors: each of a pipeline's thousands of small regions then begins by
waking a worker up. On two cores a tiny pipeline took 1.75 times as long on a lane as in a thread alone.
Held by tests/executor/test_cpu_threads.py.
"""

import torch


class CpuThreads:
    """Made in the engine's thread before anything large is computed there. On other devices than a CPU does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.get_num_threads() if device.type == "cpu" else None
        if self._count is not None:
            torch.set_num_threads(1)

    def give(self) -> None:
        """To the calling thread: a lane's when it starts, the engine's when no lane is left. Idempotent."""
        if self._count is not None:
            torch.set_num_threads(self._count)
