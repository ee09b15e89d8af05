# SPDX-License-Identifier: Apache-2.0
"""`CpuThreads`: reserves torch's CPU threads for the worker threads that run pipelines.

OpenMP has a thread pool for every thread that has run a parallel region. As soon as there are more
threads than processors, GNU's OpenMP shortens the time for which all of them spin before they
sleep. Each of the thousands of small parallel regions of a pipeline then starts by waking up a
thread. On two cores this made a tiny pipeline 1.75 times slower. The engine's own thread therefore
has no pool.
"""

import torch


class CpuThreads:
    """Distributes torch's CPU threads. It does nothing on other devices.

    Create it in the engine's thread before that thread runs any large computation.

    Args:
        device: Device of the pipeline.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.get_num_threads() if device.type == "cpu" else None
        if self._count is not None:
            torch.set_num_threads(1)

    def set_threads(self) -> None:
        """Assign the CPU threads to the calling thread. Idempotent.

        It is called by a worker thread when it starts, and by the engine's thread when no worker
        thread is left.
        """
        if self._count is not None:
            torch.set_num_threads(self._count)
