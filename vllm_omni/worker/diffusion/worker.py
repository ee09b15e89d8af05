# SPDX-License-Identifier: Apache-2.0
"""`DiffusionWorkerMixin`: changes to vLLM's worker that the CUDA and CPU workers share.

vLLM's worker sets up devices and process groups, provides weight pools for sleep mode, transfers
tensors between pipeline stages, and handles RPCs. This package adds the runner, the warm-up, sleep
mode for sessions, and the handling of a failed rank.
"""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.engine_arguments.refusals import WORKER_CLS, check_ar_worker
from vllm_omni.model_executor.fast_paths import engine_paths
from vllm_omni.model_executor.layers.fast_path import FastPath, joined, log_paths
from vllm_omni.model_executor.models.registry import ARCHITECTURES
from vllm_omni.runtime.processes import end_with_parent, engine_processes
from vllm_omni.worker.diffusion.liveness import (
    Watchdog,
    failing_together,
    runs_steps,
    watch_other_ranks,
)
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
from vllm_omni.worker.diffusion.sessions.background_snapshots import BackgroundSnapshots
from vllm_omni.worker.diffusion.sessions.live_copies import LiveCopies
from vllm_omni.worker.diffusion.sessions.session_files import SuspendedFiles
from vllm_omni.worker.diffusion.sessions.snapshots import SessionSnapshots
from vllm_omni.worker.diffusion.warm_up import warm_up

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


class DiffusionWorkerMixin(_Worker):
    """Mixin for a vLLM worker class. List the mixin before the worker class."""

    model_runner: DiffusionGPUModelRunner  # type: ignore[assignment]
    device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        # The diffusion runner belongs to neither runner generation. False disables V2-only code
        # (warm-up, pooling).
        self.use_v2_model_runner = False
        self._watchdog: Watchdog | None = None
        self._fast_paths: list[FastPath] = []

    def _make_model_runner(self) -> DiffusionGPUModelRunner:  # type: ignore[override]
        # If one of vLLM's own config hooks took precedence, the architecture is wrong.
        if self.vllm_config.model_config.architecture not in ARCHITECTURES:
            check_ar_worker(WORKER_CLS)
        return DiffusionGPUModelRunner(self.vllm_config, self.device)

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run the largest shape once, and determine how much memory sessions may use."""
        # vLLM reads replies in rank order, so it reads an exception from the first rank.
        with failing_together(heard=get_world_group().rank == 0):
            if (folder := self.model_runner.omni.suspend_dir) is not None:
                self.model_runner.sessions.files = SuspendedFiles(Path(folder), self.snapshots)
            seconds = warm_up(self.model_runner, self._used_before())
            self._fast_paths = self._paths_of_all_ranks()
        timeout_s = self.model_runner.omni.rank_timeout_s
        if timeout_s is not None and get_world_group().world_size > 1:
            self._watchdog = watch_other_ranks(timeout_s)
        # vLLM's workers also freeze the heap. Full collections then visit only objects that
        # requests have created.
        freeze_gc_heap()
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _paths_of_all_ranks(self) -> list[FastPath]:
        """Return the fast paths of all ranks, and log them on the first rank (collective)."""
        world = get_world_group()
        own = engine_paths(self.model_runner.network, self.vllm_config, self.device)
        of_ranks = [own] * world.world_size
        if world.world_size > 1:
            dist.all_gather_object(of_ranks, own, group=world.cpu_group)
        paths = joined(of_ranks)
        if world.rank == 0:
            log_paths(paths)
        return paths

    def _used_before(self) -> int:
        """Return the number of bytes in use on the device before this rank loaded anything."""
        return 0

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if get_world_group().world_size == 1:
            return super().execute_model(scheduler_output)
        with failing_together(heard=runs_steps()):
            output = super().execute_model(scheduler_output)
            self.model_runner.role.listen()
            return output

    def shutdown(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        super().shutdown()

    def session_stats(self) -> dict[str, Any]:
        """Return statistics of this rank's sessions as JSON types, for `collective_rpc`."""
        return self.model_runner.sessions.stats()

    def fast_paths(self) -> list[dict[str, Any]]:
        """Return the engine's fast paths (`FastPath`) as JSON types, for `collective_rpc`."""
        return [asdict(path) for path in self._fast_paths]

    def engine_processes(self) -> dict[str, Any]:
        """Return the pids of this rank and of its engine core as JSON types, for
        `collective_rpc`.
        """
        return engine_processes()

    @cached_property
    def snapshots(self) -> SessionSnapshots:
        return SessionSnapshots(self.model_runner)

    def describe_session(self, session_id: str) -> dict[str, Any]:
        """Describe this rank's part of a session that will be saved.

        `session_files.snapshot_exchange.save_exchange` calls this RPC first.
        """
        return self.snapshots.describe(session_id)

    def write_session(
        self, session_id: str, path: str, chunk_index: int, starts: list[int]
    ) -> dict[str, Any]:
        """Copy this rank's tensors of a session to their offsets in the snapshot file.

        `save_exchange` calls this RPC after `describe_session`.
        """
        return self.snapshots.write(session_id, path, chunk_index, starts)

    @cached_property
    def background_snapshots(self) -> BackgroundSnapshots:
        return BackgroundSnapshots(self.snapshots, self.device)

    @torch.inference_mode()
    def stage_snapshot(self, session_id: str) -> dict[str, Any]:
        """Copy this rank's part of a session to host memory.

        For a periodic snapshot, `session_files.snapshot_exchange.live_save_exchange` calls this RPC
        first.
        """
        return self.background_snapshots.stage(session_id)

    def write_snapshot(self, session_id: str, path: str, starts: list[int]) -> dict[str, Any]:
        """Start writing the copy of a session to its offset in the snapshot file.

        `live_save_exchange` calls this RPC after `stage_snapshot`.
        """
        return self.background_snapshots.write(session_id, path, starts)

    def snapshot_written(self, session_id: str) -> dict[str, Any]:
        """Return None while this rank's part of a periodic snapshot is being written.

        `live_save_exchange` repeats this RPC until the parts of all ranks are on disk. The result
        is then the CPU time in seconds that writing took from the denoise steps.
        """
        return self.background_snapshots.written(session_id)

    @cached_property
    def live_copies(self) -> LiveCopies:
        return LiveCopies(self.snapshots, self.device)

    def describe_copy(self, session_id: str, path: str) -> dict[str, Any]:
        """Describe this rank's part of a session that will be moved.

        `session_files.snapshot_exchange.copy_exchange` calls this RPC first.
        """
        return self.live_copies.describe(session_id, path)

    def write_copy(
        self, session_id: str, path: str, chunk_index: int, starts: list[int], is_playing: bool
    ) -> dict[str, Any]:
        """Write the data that has changed since the last version of the file.

        `copy_exchange` calls this RPC after `describe_copy`.
        """
        return self.live_copies.write(session_id, path, chunk_index, starts, is_playing)

    def copy_written(self, path: str) -> dict[str, Any]:
        """While this rank's part of the file is being written, return None. Afterwards, return the
        number of bytes written.

        `copy_exchange` repeats this RPC until all ranks have written their parts.
        """
        return self.live_copies.written(path)

    def end_copy(self, path: str) -> dict[str, Any]:
        """Release the memory that this rank uses for the snapshot file of a session that has been
        moved.
        """
        return self.live_copies.end(path)

    @torch.inference_mode()
    def update_session(
        self, session_id: str, path: str, data_parallel_rank: int | None = None
    ) -> dict[str, Any]:
        """Update this rank's part of a restored session from a later version of its file.

        `session_files.snapshot_exchange.update_exchange` calls this RPC.
        """
        return self.snapshots.update(session_id, path, data_parallel_rank)

    @torch.inference_mode()
    def restore_session(
        self, session_id: str, path: str, data_parallel_rank: int | None = None
    ) -> dict[str, Any]:
        """Create this rank's part of a session from a snapshot file.

        `session_files.snapshot_exchange.restore_exchange` calls this RPC.
        """
        return self.snapshots.restore(session_id, path, data_parallel_rank)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        self.snapshots.invalidate_weights()

    def request_progress(self) -> dict[str, list[int]]:
        """Return `{session id: [steps done, steps in total]}` for the chunks in flight, for
        `collective_rpc`.
        """
        return self.model_runner.request_progress()

    def device_memory(self) -> dict[str, int]:
        """Return memory statistics of this rank's device in bytes, for `collective_rpc`.

        The result is empty on a CPU.
        """
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "used": total - free,
            "total": total,
            "torch_allocated": torch.cuda.memory_allocated(self.device),
            "torch_reserved": torch.cuda.memory_reserved(self.device),
            "torch_peak": torch.cuda.max_memory_allocated(self.device),
        }

    def close_session(self, session_id: str) -> bool:
        """Close a session that has no chunk in flight, for `collective_rpc`.

        In contrast, a request with `op="close"` waits for the chunks in flight.

        Returns:
            Whether a session was closed.
        """
        sessions = self.model_runner.sessions
        return not sessions.is_pinned(session_id) and sessions.close(session_id)
