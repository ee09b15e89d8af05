# SPDX-License-Identifier: Apache-2.0
"""`CpuThreads`: reserves torch's CPU threads for the worker threads that run pipelines.

OpenMP creates a thread pool for every thread that has run a parallel region. As soon as there are
more threads than processors, GNU's OpenMP shortens the time for which waiting threads spin before
they sleep. Each of the thousands of small parallel regions of a pipeline then starts by waking up a
thread, which made a tiny pipeline 1.75 times slower on two cores. The engine's own thread therefore
runs with a single OpenMP thread and has no pool.
"""

import torch


class CpuThreads:
    """Assigns torch's CPU threads to worker threads. Does nothing if the device is not a CPU.

    The object must be created in the engine's thread before that thread runs any large computation.

    Args:
        device: Device of the pipeline.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.get_num_threads() if device.type == "cpu" else None
        if self._count is not None:
            torch.set_num_threads(1)

    def set_threads(self) -> None:
        """Assign the CPU threads to the calling thread. Idempotent.

        Each worker thread calls this method when it starts. The engine's thread calls this method
        when no worker thread is left.
        """
        if self._count is not None:
            torch.set_num_threads(self._count)
