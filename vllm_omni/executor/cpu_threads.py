# SPDX-License-Identifier: Apache-2.0
"""`CpuThreads`: reserves torch's CPU threads for the worker threads that run pipelines.

OpenMP has a thread pool for every thread that ever ran a parallel region. As soon as there are more
threads than processors, GNU's OpenMP shortens the time that all of them spin before they sleep.
Each of a pipeline's thousands of small parallel regions then starts by waking a thread up. On two
cores this made a tiny pipeline 1.75 times slower. The engine's own thread therefore has no pool.
"""

import torch


class CpuThreads:
    """Distributes torch's CPU threads. Does nothing on other devices.

    Create it in the engine's thread before that thread runs any large computation.

    Args:
        device: Device of the pipeline.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.get_num_threads() if device.type == "cpu" else None
        if self._count is not None:
            torch.set_num_threads(1)

    def set_threads(self) -> None:
        """Give the CPU threads to the calling thread. Idempotent.

        A worker thread calls it when it starts, the engine's thread when no worker thread is left.
        """
        if self._count is not None:
            torch.set_num_threads(self._count)
