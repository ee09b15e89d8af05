# SPDX-License-Identifier: Apache-2.0
"""`CpuThreads`: reserves torch's CPU threads for the worker threads that run pipelines.

OpenMP creates a thread pool for every thread that has run a parallel region. As soon as there are
more threads than processors, GNU's OpenMP shortens the time that waiting threads spin before they
sleep. Each of a pipeline's thousands of small parallel regions then starts by waking up a thread.
These wake-ups made a tiny pipeline 1.75 times slower on two cores. The engine's own thread
therefore runs with a single OpenMP thread and has no pool.
"""

import torch


class CpuThreads:
    """Assigns torch's CPU threads to worker threads. Does nothing if the device is not a CPU.

    The object must be created in the engine's thread before that thread starts any large
    computation.

    Args:
        device: The pipeline's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.get_num_threads() if device.type == "cpu" else None
        if self._count is not None:
            torch.set_num_threads(1)

    def set_threads(self) -> None:
        """Assign the CPU threads to the calling thread. Idempotent.

        Each worker thread calls this method when it starts. The engine's thread calls it when no
        worker thread is left.
        """
        if self._count is not None:
            torch.set_num_threads(self._count)
