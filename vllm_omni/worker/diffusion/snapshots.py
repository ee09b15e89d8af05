# SPDX-License-Identifier: Apache-2.0
"""`SessionSnapshots`: one rank's side of saving and restoring sessions.

Works between engine steps. A session is saved as its last committed chunk left it, whatever is in flight; saving
changes nothing. Restoring makes a new session through the model, under the store's rules for room, or leaves no trace.
Knows no model by name. Held by tests/worker/test_snapshots.py and tests/engine/test_session_snapshots.py.
"""

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.lora.store import named
from vllm_omni.outputs import RequestFailed
from vllm_omni.sessions.snapshot import (
    UNSEEN,
    ModelIdentity,
    OpenSnapshot,
    Parallel,
    RankDescription,
    check_fits,
    describe,
)
from vllm_omni.sessions.snapshot_writing import write_tensors
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

_SAMPLES = 16
"""Values of each parameter that its digest sees."""
_SHAPE_FIELDS = ("prompt", "seed", "height", "width", "output", "window_frames", "sink_frames", "options")
"""Fields of a first chunk's request that a snapshot may hold."""

Answer = dict[str, Any]
P = ParamSpec("P")


def answers(work: Callable[P, Any]) -> Callable[P, Answer]:
    """An RPC answers for every rank, `{"ok": result}` or `{"error": [code, message]}`.

    An exception would hide the others' answers.
    """

    @functools.wraps(work)
    def answer(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return {"ok": work(*args, **kwargs)}
        except RequestFailed as failure:
            return {"error": [failure.code, failure.message]}
        except torch.OutOfMemoryError:
            return {"error": ["oom", "the device ran out of memory for this session"]}
        except Exception:
            logger.exception("a session could not be saved or restored")
            return {"error": ["engine_error", "the worker failed on this snapshot; the server's log has details"]}

    return answer


class SessionSnapshots:
    """runner: owner of the sessions; only its store and model are used."""

    def __init__(self, runner: DiffusionGPUModelRunner) -> None:
        self._runner = runner
        self._weights: str | None = None
        self._model: ModelIdentity | None = None

    @answers
    def describe(self, session_id: str) -> bytes:
        """`RankDescription` as JSON."""
        return msgspec.json.encode(self.described(self.committed(session_id)))

    def described(self, session: Any) -> RankDescription:
        """This rank's part of a session without its bytes."""
        return describe(
            self._identity(),
            self._weights_digest(),
            session.chunk_index,
            msgspec.to_builtins(session.opening_params()),
            session.scalars(),
            session.tensors(),
            named(session.adapters),
        )

    @answers
    def write(self, session_id: str, path: str, chunk_index: int, starts: Sequence[int]) -> None:
        """Copy this rank's tensors into the file; `chunk_index` must still be the session's next chunk.

        starts: as `SnapshotPlan.starts`.
        """
        session = self.committed(session_id)
        if session.chunk_index != chunk_index:
            raise RequestFailed("session_busy", "a chunk of this session was finished meanwhile; ask again")
        write_tensors(Path(path), starts, rank_in_world(), session.tensors())

    @answers
    def restore(self, session_id: str, path: str, data_parallel_rank: int | None = None) -> None:
        """Make this rank's part of a new session from a file."""
        own = self._runner.vllm_config.parallel_config.data_parallel_index
        if data_parallel_rank is None or data_parallel_rank == own:
            self._restore(session_id, Path(path))

    def forget_weights(self) -> None:
        """The weights were loaded anew."""
        self._weights = self._model = None

    def _restore(self, session_id: str, path: Path) -> None:
        sessions, model = self._runner.sessions, self._runner.model
        if session_id in sessions:
            raise RequestFailed("session_exists", "a session of this id is live here")
        with contextlib.ExitStack() as stack:
            try:
                stored = stack.enter_context(OpenSnapshot.open(path))
            except OSError as error:
                raise RequestFailed("snapshot_storage", UNSEEN) from error
            header = stored.header
            part = check_fits(header, self._identity(), rank_in_world(), self._weights_digest())
            params = _opening(header.opening, session_id)
            adapters = self._runner.adapters.select_saved(header.lora)
            nbytes = model.session_nbytes(params)
            if sessions.max_bytes is not None and nbytes > sessions.max_bytes:
                raise RequestFailed(
                    "snapshot_too_large",
                    f"the session needs {nbytes} bytes; all sessions here may hold {sessions.max_bytes}",
                )
            sessions.make_room(nbytes)
            session = model.new_session(params)
            try:
                saved = stored.rank(rank_in_world(), part)
                session.restore(part.scalars, saved)
                saved.finish()
                if session.chunk_index != header.chunk_index:
                    raise RequestFailed("invalid_snapshot", "the snapshot's parts are of different chunks")
            except BaseException:
                session.close()
                raise
            session.adapters = adapters
            sessions.add(session)

    def committed(self, session_id: str) -> Any:
        """The session, with every chunk whose result is known committed on this rank, and all its tensors written."""
        self._runner.settle(session_id)
        session = self._runner.sessions.get(session_id)
        if session.failure is not None:
            raise session.failure
        if session.chunk_index == 0:
            raise RequestFailed("unknown_session", f"session {session_id!r} has no finished chunk yet")
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)  # a decode on another stream may still fill a cache
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


def model_identity(vllm_config: VllmConfig, shares_decode: bool, partition: Sequence[int]) -> ModelIdentity:
    """Everything except the weights that must be equal for a session to continue bit for bit.

    partition: layers of each stage now; () = as even as possible.
    """
    hf_config = vllm_config.model_config.hf_config
    omni = vllm_config.additional_config.get("omni", {}) if isinstance(vllm_config.additional_config, dict) else {}
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
    if stages:  # they decide each rank's part of a session
        described["stages"] = stages
    text = json.dumps(described, sort_keys=True, default=str)
    parallel = vllm_config.parallel_config
    return ModelIdentity(
        family=hf_config.omni_family,
        config=hashlib.sha256(text.encode()).hexdigest(),
        parallel=Parallel(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            bool(options.get("sequence_parallel", False)),
            shares_decode,
        ),
    )


def weights_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, shapes, dtypes and evenly spaced samples of parameters: enough to tell checkpoints apart."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        if parameter.numel():
            flat = parameter.detach().flatten() if parameter.is_contiguous() else parameter.detach()[0].flatten()
            samples = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].contiguous()
            digest.update(samples.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _opening(fields: Mapping[str, Any], session_id: str) -> DiffusionParams:
    """A request that opens a session of the saved sizes. Raises `RequestFailed`."""
    unknown = sorted(set(fields) - set(_SHAPE_FIELDS) - {"session_id"})
    if unknown:
        raise RequestFailed("invalid_snapshot", f"the snapshot's opening holds {unknown[:3]}")
    try:
        return msgspec.convert({**fields, "session_id": session_id}, DiffusionParams)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's opening: {error}") from error


def rank_in_world() -> int:
    """This process among all ranks of the engine: the place of its part in a file."""
    return int(get_world_group().rank_in_group)
