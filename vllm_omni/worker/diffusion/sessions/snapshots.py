# SPDX-License-Identifier: Apache-2.0
"""`SessionSnapshots`: saves and restores sessions on one rank.

Saving and restoring run between engine steps. A session is saved in its state after the last
committed chunk, regardless of chunks in flight, and is not changed. Restoring creates a new session
through the model, with the capacity checks of the session store. If restoring fails, no session
remains. This module does not depend on a model.
"""

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.dtypes import kv_cache_dtype
from vllm_omni.model_executor.layers.lora.store import named
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import (
    UNSEEN,
    ModelIdentity,
    OpenSnapshot,
    ParallelLayout,
    RankDescription,
    check_fits,
    describe,
)
from vllm_omni.session_files.snapshot_writing import write_tensors
from vllm_omni.tensors.digests import tensor_digests
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

_SAMPLES = 16
"""Number of values per parameter included in the weights digest."""
_SHAPE_FIELDS = (
    "prompt",
    "seed",
    "height",
    "width",
    "output",
    "window_frames",
    "sink_frames",
    "options",
)
"""Fields of the first chunk's request that a snapshot may contain."""

Result = dict[str, Any]
P = ParamSpec("P")


def returns_result(work: Callable[P, Any]) -> Callable[P, Result]:
    """Decorate an RPC so that every rank returns `{"ok": result}` or `{"error": [code, message]}`.

    The RPC does not raise exceptions, because an exception would hide the results of the other
    ranks.
    """

    @functools.wraps(work)
    def response(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return {"ok": work(*args, **kwargs)}
        except RequestFailed as failure:
            return {"error": [failure.code, failure.message]}
        except torch.OutOfMemoryError:
            return {"error": ["oom", "the device ran out of memory for this session"]}
        except Exception:
            logger.exception("a session could not be saved or restored")
            return {
                "error": [
                    "engine_error",
                    "the worker failed on this snapshot; the server's log has details",
                ]
            }

    return response


class SessionSnapshots:
    """Saves and restores the sessions on one rank.

    Args:
        runner: Model runner, which owns the sessions.
    """

    def __init__(self, runner: DiffusionGPUModelRunner) -> None:
        self._runner = runner
        self._weights: str | None = None
        self._model: ModelIdentity | None = None

    @returns_result
    def describe(self, session_id: str) -> bytes:
        """Return the `RankDescription` of a session as JSON."""
        return msgspec.json.encode(self.described(self.committed(session_id)))

    def described(
        self,
        session: Any,
        tensors: Mapping[str, torch.Tensor] | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> RankDescription:
        """Describe this rank's part of a session, without its data.

        Args:
            session: Session to describe.
            tensors: Tensors of the session in file order. Default: the tensors in the session's own
                order.
            digests: Digests of the tensors, keyed by name; see `RankPart.digests`.
        """
        return describe(
            self._identity(),
            self._weights_digest(),
            session.chunk_index,
            msgspec.to_builtins(session.start_params()),
            session.scalars(),
            session.tensors() if tensors is None else tensors,
            named(session.adapters),
            digests,
        )

    @returns_result
    def write(self, session_id: str, path: str, chunk_index: int, starts: Sequence[int]) -> None:
        """Copy this rank's tensors of a session into the snapshot file.

        Args:
            session_id: Id of the session to save.
            path: Path of the snapshot file.
            chunk_index: Index that the session's next chunk must have.
            starts: File offset of each rank's tensors; see `SnapshotPlan.starts`.
        """
        session = self.committed(session_id)
        if session.chunk_index != chunk_index:
            raise RequestFailed(
                "session_busy", "a chunk of this session finished in the meantime; try again"
            )
        write_tensors(Path(path), starts, rank_in_world(), session.tensors())

    @returns_result
    def restore(self, session_id: str, path: str, data_parallel_rank: int | None = None) -> None:
        """Create this rank's part of a new session from a file.

        Args:
            session_id: Id of the new session.
            path: Path of the snapshot file.
            data_parallel_rank: Data-parallel rank that restores the session, or None if all ranks
                restore it.
        """
        own = self._runner.vllm_config.parallel_config.data_parallel_index
        if data_parallel_rank is None or data_parallel_rank == own:
            self._restore(session_id, Path(path))

    @returns_result
    def update(self, session_id: str, path: str, data_parallel_rank: int | None = None) -> None:
        """Update a restored session from a later version of its file.

        Only tensors that differ from the session's tensors are read. If the version is complete,
        the digests of all tensors are compared afterwards. The digests of an incomplete version are
        not compared, because a chunk may have changed the session while the version was written. If
        the update fails, the session is closed.

        Args:
            session_id: Id of the restored session.
            path: Path of the snapshot file.
            data_parallel_rank: Data-parallel rank that has restored the session, or None if all
                ranks have restored it.
        """
        own = self._runner.vllm_config.parallel_config.data_parallel_index
        if data_parallel_rank is not None and data_parallel_rank != own:
            return
        started_s = time.perf_counter()
        try:
            self._update(self._runner.sessions.get(session_id), Path(path))
            took_ms = (time.perf_counter() - started_s) * 1e3
            logger.info("session_updated session=%s took_ms=%.1f", session_id, took_ms)
        except BaseException:
            self._runner.sessions.close(session_id)
            raise

    def _update(self, session: Any, path: Path) -> None:
        with _opened(path) as stored:
            header = stored.header
            part = check_fits(header, self._identity(), rank_in_world(), self._weights_digest())
            shape = {**msgspec.to_builtins(session.start_params()), "prompt": None}
            if {**header.opening, "prompt": None, "session_id": session.session_id} != shape:
                raise RequestFailed("session_busy", "the session was started anew; try again")
            saved = stored.rank(rank_in_world(), part, tensor_digests(session.tensors()))
            session.restore(part.scalars, saved)
            saved.finish()
            if session.chunk_index != header.chunk_index:
                raise RequestFailed(
                    "invalid_snapshot", "the snapshot's parts belong to different chunks"
                )
            session.adapters = self._runner.adapters.select_saved(header.lora)
            if header.is_complete and tensor_digests(session.tensors()) != part.digests:
                raise RequestFailed("invalid_snapshot", "the session was damaged on its way")

    def invalidate_weights(self) -> None:
        """Invalidate the digest of the weights after the weights have been reloaded."""
        self._weights = self._model = None

    def _restore(self, session_id: str, path: Path) -> None:
        sessions = self._runner.sessions
        if session_id in sessions:
            raise RequestFailed("session_exists", "a session of this id is live here")
        sessions.add_session(self.load(session_id, path, sessions.make_room))

    def load(self, session_id: str, path: Path, make_room: Callable[[int], None]) -> Any:
        """Create a session from a file, without adding it to the session store.

        Args:
            session_id: Id of the session.
            path: Path of the snapshot file.
            make_room: Function that makes room for the given number of bytes, or raises an
                exception.

        Raises:
            RequestFailed: The file is invalid or does not fit. No session remains.
        """
        sessions, model = self._runner.sessions, self._runner.model
        with _opened(path) as stored:
            header = stored.header
            part = check_fits(header, self._identity(), rank_in_world(), self._weights_digest())
            params = _start_options(header.opening, session_id)
            adapters = self._runner.adapters.select_saved(header.lora)
            nbytes = model.session_nbytes(params)
            if sessions.max_bytes is not None and nbytes > sessions.max_bytes:
                raise RequestFailed(
                    "snapshot_too_large",
                    f"the session needs {nbytes} bytes; all sessions here may hold "
                    f"{sessions.max_bytes}",
                )
            make_room(nbytes)
            session = model.new_session(params)
            try:
                saved = stored.rank(rank_in_world(), part)
                session.restore(part.scalars, saved)
                saved.finish()
                if session.chunk_index != header.chunk_index:
                    raise RequestFailed(
                        "invalid_snapshot", "the snapshot's parts belong to different chunks"
                    )
                make_room(session.nbytes)  # larger than `nbytes` if the session's window has grown
            except BaseException:
                session.close()
                raise
            session.adapters = adapters
            return session

    def committed(self, session_id: str) -> Any:
        """Return a session after committing all its finished chunks and waiting until all its
        tensors have been written.
        """
        self._runner.settle(session_id)
        session = self._runner.sessions.get(session_id)
        if session.failure is not None:
            raise session.failure
        if session.chunk_index == 0:
            raise RequestFailed(
                "unknown_session", f"session {session_id!r} has no finished chunk yet"
            )
        if self._runner.device.type == "cuda":
            # A decode on another CUDA stream may still be writing to a cache.
            torch.cuda.synchronize(self._runner.device)
        return session

    def _identity(self) -> ModelIdentity:
        if self._model is None:
            self._model = model_identity(
                self._runner.vllm_config, self._runner.parts.shares_decode, self._runner.partition
            )
        return self._model

    def _weights_digest(self) -> str:
        if self._weights is None:
            with self._runner.adapters.applied(()):
                self._weights = weights_digest(dict(self._runner.network.named_parameters()))
        return self._weights


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[OpenSnapshot]:
    with contextlib.ExitStack() as stack:
        try:
            stored = stack.enter_context(OpenSnapshot.open(path))
        except OSError as error:
            raise RequestFailed("snapshot_storage", UNSEEN) from error
        yield stored


def model_identity(
    vllm_config: VllmConfig, shares_decode: bool, partition: Sequence[int]
) -> ModelIdentity:
    """Describe everything that must be the same for a session to resume bit-identically, except the
    weights.

    Args:
        vllm_config: Configuration of the engine.
        shares_decode: Whether the ranks that share layers decode together.
        partition: Current number of layers in each stage. () means that layers are distributed as
            evenly as possible.
    """
    hf_config = vllm_config.model_config.hf_config
    omni = (
        vllm_config.additional_config.get("omni", {})
        if isinstance(vllm_config.additional_config, dict)
        else {}
    )
    options = omni.get("model", {})
    described = {
        "config": {
            name: value
            for name, value in hf_config.to_dict().items()
            if not name.startswith("_") and name != "transformers_version"
        },
        "options": options,
        "dtype": str(vllm_config.model_config.dtype),
    }
    if kv_cache_dtype(vllm_config.cache_config.cache_dtype) is not None:
        described["kv_cache_dtype"] = "fp8"  # the only other format; `fp8_e4m3` is the same one
    stages = {name: omni[name] for name in ("vae_stage", "pipeline") if omni.get(name)}
    if partition:
        stages["pipeline_partition"] = list(partition)
    if stages:  # the stages determine which part of a session each rank has
        described["stages"] = stages
    text = json.dumps(described, sort_keys=True, default=str)
    parallel = vllm_config.parallel_config
    return ModelIdentity(
        family=hf_config.omni_family,
        config=hashlib.sha256(text.encode()).hexdigest(),
        parallel=ParallelLayout(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            bool(options.get("sequence_parallel", False)),
            shares_decode,
        ),
    )


def weights_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the names, shapes, dtypes and evenly spaced samples of the parameters.

    The samples are sufficient to distinguish checkpoints.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        if parameter.numel():
            flat = (
                parameter.detach().flatten()
                if parameter.is_contiguous()
                else parameter.detach()[0].flatten()
            )
            samples = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].contiguous()
            digest.update(samples.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _start_options(fields: Mapping[str, Any], session_id: str) -> DiffusionParams:
    """Return the parameters of a request that creates a session of the saved size.

    Raises:
        RequestFailed: The fields are invalid (code `invalid_snapshot`).
    """
    unknown = sorted(set(fields) - set(_SHAPE_FIELDS) - {"session_id"})
    if unknown:
        raise RequestFailed(
            "invalid_snapshot", f"the snapshot's first request has unknown fields {unknown[:3]}"
        )
    try:
        return msgspec.convert({**fields, "session_id": session_id}, DiffusionParams)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's first request: {error}") from error


def rank_in_world() -> int:
    """Return the rank of this process in the engine. The rank determines which part of a snapshot
    file the process writes and reads.
    """
    return int(get_world_group().rank_in_group)
