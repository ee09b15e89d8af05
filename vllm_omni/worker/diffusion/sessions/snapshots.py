# SPDX-License-Identifier: Apache-2.0
"""`SessionSnapshots`: saves and restores sessions on one rank.

Both run between engine steps. A session is saved in its state after the last committed chunk,
regardless of chunks in flight; saving does not change it. Restoring creates a new session through
the model, with the same capacity checks as the session store; if it fails, no session remains. This
module does not depend on a model.
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
"""Number of values of each parameter in the digest of the weights."""
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
"""Fields of a first chunk's request that a snapshot may contain."""

Result = dict[str, Any]
P = ParamSpec("P")


def returns_result(work: Callable[P, Any]) -> Callable[P, Result]:
    """Decorate an RPC to return `{"ok": result}` or `{"error": [code, message]}` on every rank.

    An exception would hide the results of the other ranks.
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
    """Snapshots of one rank.

    Args:
        runner: Owner of the sessions. Only its session store and model are used.
    """

    def __init__(self, runner: DiffusionGPUModelRunner) -> None:
        self._runner = runner
        self._weights: str | None = None
        self._model: ModelIdentity | None = None

    @returns_result
    def describe(self, session_id: str) -> bytes:
        """Return `RankDescription` of a session as JSON."""
        return msgspec.json.encode(self.described(self.committed(session_id)))

    def described(
        self,
        session: Any,
        tensors: Mapping[str, torch.Tensor] | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> RankDescription:
        """Describe this rank's part of a session, without its data.

        Args:
            session: The session.
            tensors: Tensors of the session in the order of the file. Default: the order of the
                session.
            digests: As `RankPart.digests`.
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
        """Copy this rank's tensors into the file.

        Args:
            session_id: Session to save.
            path: The file.
            chunk_index: Required index of the session's next chunk.
            starts: As `SnapshotPlan.starts`.
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
            path: The file.
            data_parallel_rank: The only data-parallel rank that restores it; None selects all.
        """
        own = self._runner.vllm_config.parallel_config.data_parallel_index
        if data_parallel_rank is None or data_parallel_rank == own:
            self._restore(session_id, Path(path))

    @returns_result
    def update(self, session_id: str, path: str, data_parallel_rank: int | None = None) -> None:
        """Update a restored session from a later version of its file.

        Only the differences are read. If the version is complete, the digests of all tensors are
        compared afterwards. Those of an earlier version differ where a chunk has changed the
        session while the version was written. If this fails, the session is closed.

        Args:
            session_id: Id of the restored session.
            path: The file.
            data_parallel_rank: The only data-parallel rank that has it; None selects all.
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
        """Invalidate the digest of the weights, because they were reloaded."""
        self._weights = self._model = None

    def _restore(self, session_id: str, path: Path) -> None:
        sessions = self._runner.sessions
        if session_id in sessions:
            raise RequestFailed("session_exists", "a session of this id is live here")
        sessions.add_session(self.load(session_id, path, sessions.make_room))

    def load(self, session_id: str, path: Path, make_room: Callable[[int], None]) -> Any:
        """Create a session from a file, without making it live.

        Args:
            session_id: Id of the session.
            path: The file.
            make_room: Makes room for so many bytes, or raises.

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
                make_room(session.nbytes)  # more than `nbytes` if its window has grown
            except BaseException:
                session.close()
                raise
            session.adapters = adapters
            return session

    def committed(self, session_id: str) -> Any:
        """Return a session with all finished chunks committed and all tensors written."""
        self._runner.settle(session_id)
        session = self._runner.sessions.get(session_id)
        if session.failure is not None:
            raise session.failure
        if session.chunk_index == 0:
            raise RequestFailed(
                "unknown_session", f"session {session_id!r} has no finished chunk yet"
            )
        if self._runner.device.type == "cuda":
            # a decode on another stream may still write a cache
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
    """Describe everything besides the weights that must match for a session to resume
    bit-identically.

    Args:
        vllm_config: Configuration of the engine.
        shares_decode: Whether the ranks that share layers decode together.
        partition: Current number of layers of each stage; () means as even as possible.
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
    if vllm_config.cache_config.cache_dtype != "auto":
        described["kv_cache_dtype"] = vllm_config.cache_config.cache_dtype
    stages = {name: omni[name] for name in ("vae_stage", "pipeline") if omni.get(name)}
    if partition:
        stages["pipeline_partition"] = list(partition)
    if stages:  # they determine each rank's part of a session
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
    """Hash names, shapes, dtypes and evenly spaced samples of the parameters.

    This is sufficient to distinguish checkpoints.
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
    """Return the request that creates a session of the saved size.

    Raises:
        RequestFailed: `invalid_snapshot`.
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
    """Return the rank of this process in the engine, which determines its part of a file."""
    return int(get_world_group().rank_in_group)
