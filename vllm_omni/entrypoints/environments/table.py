# SPDX-License-Identifier: Apache-2.0
"""`EnvironmentTable`: all clients' environments in one API server process.

Each environment is a session of the session manager, which handles capacity, quotas, idle time and
draining. All environments of one `CreateRequest` form an `EnvironmentGroup`, which belongs to one
API key. A group's chunks are requested at the same time, so the engine can batch them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from vllm_omni.actions import ActionFrame
from vllm_omni.entrypoints.environments.protocol import (
    KINDS,
    ChunkEntry,
    CreateRequest,
    ResetEntry,
    StepEntry,
)
from vllm_omni.entrypoints.errors import EndpointError, not_found
from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls, ChunkSpan, LiveChunks
from vllm_omni.entrypoints.realtime.connection.images import load_named_images, read_image
from vllm_omni.entrypoints.realtime.sessions.run import (
    FinishedChunk,
    ReplyOptions,
    SessionJob,
    SessionStart,
)
from vllm_omni.entrypoints.realtime.sessions.session import Session, new_session_id
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.runtime import log_context

ENDPOINT: Final = "environments"
"""Name of the endpoint in metrics."""
_SWEEP_S: Final = 5.0


class ChunkArrays:
    """One chunk's arrays by kind, and the chunk's entry in the reply. The caller sets the entry's
    environment index later.
    """

    def __init__(self, chunk: FinishedChunk) -> None:
        self.arrays = {kind: a for kind, a in chunk.result.arrays.items() if kind in KINDS}
        self.entry = ChunkEntry(
            environment=0, chunk_index=chunk.chunk_index, **chunk.result.world_pose_fields
        )

    def __len__(self) -> int:
        """Return the size in bytes, because the session code measures payloads with `len`."""
        return sum(array.nbytes for array in self.arrays.values())


class _OneChunk(LiveChunks):
    """Source for one chunk that is generated with one action."""

    num_chunks = 1

    def __init__(self, action: ActionFrame | None, prompt: str | None) -> None:
        self._action, self._prompt = action, prompt

    def sample(self, span: ChunkSpan) -> ChunkControls:
        actions = None if self._action is None else [self._action] * span.num_latents
        return ChunkControls(actions=actions, prompt=self._prompt)


class EnvironmentGroup:
    """The environments created by one client request.

    Args:
        manager: The process's session manager.
        principal: Owner of the environments, derived from the API key.
        client: Client whose limits and quotas apply to the sessions.
        request: Request that specifies the environments' properties.
        image: Start image, uint8 [H, W, 3]. None: the episodes have no start image.
        images: Named images, each uint8 [H, W, 3].
    """

    def __init__(
        self,
        manager: SessionManager,
        principal: str,
        client: str,
        request: CreateRequest,
        image: np.ndarray | None,
        images: Mapping[str, np.ndarray],
    ) -> None:
        self.id = new_session_id(manager.server_name)
        self.principal, self.client, self.request = principal, client, request
        self.last_used_s = time.monotonic()
        self.nbytes = sum(array.nbytes for array in (image, *images.values()) if array is not None)
        self._manager, self._image, self._images = manager, image, images
        self._turn = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        return self._turn.locked()

    async def reset(self, entries: Sequence[ResetEntry]) -> list[ChunkArrays | EndpointError]:
        """Start episodes, and return each environment's first chunk or error."""
        for entry in entries:
            self._manager.info.check_prompt(entry.prompt, starts_session=True)
        return await self._together([entry.environment for entry in entries], self._start, entries)

    async def step(self, entries: Sequence[StepEntry]) -> list[ChunkArrays | EndpointError]:
        """Generate the next chunk in each listed environment. Return each environment's chunk or
        error.
        """
        return await self._together(
            [entry.environment for entry in entries], self._advance, entries
        )

    async def fork(self, source: int, targets: Sequence[int]) -> None:
        """Replace environments with copies of another environment.

        Raises:
            EndpointError: The source environment has no episode, or there is no capacity for a
                copy.
        """
        self._check([source, *targets])
        async with self._exclusive():
            origin = self._session(source)
            for target in targets:
                if (old := self._manager.find(self._key(target))) is not None:
                    await old.reset()
                copy = await self._manager.branch(origin, self._key(target))
                copy.connections.add(self)

    async def close(self) -> None:
        """Free the sessions of all environments."""
        for index in range(self.request.num_envs):
            if (session := self._manager.find(self._key(index))) is not None:
                session.connections.discard(self)
                await session.reset()

    async def _together(
        self,
        indices: Sequence[int],
        run: Callable[[Any], Awaitable[ChunkArrays]],
        entries: Iterable[Any],
    ) -> list[ChunkArrays | EndpointError]:
        self._check(indices)
        async with self._exclusive():
            results: list[ChunkArrays | EndpointError] = []
            for result in await asyncio.gather(*map(run, entries), return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, EndpointError):
                    raise result
                results.append(result)
        self.last_used_s = time.monotonic()
        return results

    def _check(self, indices: Sequence[int]) -> None:
        count = self.request.num_envs
        if len(set(indices)) < len(indices) or max(indices) >= count:
            raise EndpointError(
                "invalid_request",
                f"environments must be different numbers from 0 to {count - 1}, got "
                f"{list(indices)[:8]}",
                param="environment",
            )

    def _exclusive(self) -> asyncio.Lock:
        if self.is_busy:
            raise EndpointError(
                "session_busy",
                "these environments are working on another request; wait for its reply",
            )
        self.last_used_s = time.monotonic()
        return self._turn

    async def _start(self, entry: ResetEntry) -> ChunkArrays:
        image, request = self._image, self.request
        session = self._manager.open(self._key(entry.environment), self.client, ENDPOINT)
        session.connections.add(self)
        start = SessionStart(
            load_image=None if image is None else lambda height, width: image,
            images=self._images,
            seed=entry.seed,
            height=request.height,
            width=request.width,
            restart=True,
        )
        options = {} if entry.start_pose is None else entry.start_pose.as_option()
        return await self._chunk(session, ActionFrame(), entry.prompt, start=start, options=options)

    async def _advance(self, entry: StepEntry) -> ChunkArrays:
        return await self._chunk(
            self._session(entry.environment), entry.action, None, chunk_index=entry.chunk_index
        )

    async def _chunk(
        self, session: Session, action: ActionFrame, prompt: str | None, **others: Any
    ) -> ChunkArrays:
        """Generate a session's next chunk.

        Raises:
            EndpointError: The chunk was refused or failed.
        """
        has_controls = self._manager.info.actions.has_controls
        job = SessionJob(
            request_id=new_session_id(),
            source=_OneChunk(action if has_controls else None, prompt),
            replies=ReplyOptions(
                render=lambda chunk: (ChunkArrays(chunk),), inline=True, keep=False
            ),
            output=self.request.output,
            trajectory=self.request.trajectory,
            **others,
        )
        received: list[ChunkArrays] = []

        async def receive(chunk: ChunkArrays) -> None:
            received.append(chunk)

        with log_context.bound(session_id=session.session_id):
            run = session.submit(job)
        await run.follow(receive, self, self._manager.delivery_window(None))
        return received[0]

    def _key(self, index: int) -> tuple[str, str]:
        return self.principal, f"{self.id}.{index}"

    def _session(self, index: int) -> Session:
        session = self._manager.find(self._key(index))
        if session is None or not session.started:
            raise EndpointError(
                "session_evicted",
                f"environment {index} has no episode: it was not used for "
                f"{self._manager.info.session_idle_s:g} s, or was never reset; reset it",
            )
        return session


class EnvironmentTable:
    """All environment groups in one API server process, by owner and id.

    Args:
        manager: The process's session manager.
    """

    def __init__(self, manager: SessionManager) -> None:
        self.manager = manager
        self._groups: dict[tuple[str, str], EnvironmentGroup] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def create(self, principal: str, client: str, request: CreateRequest) -> EnvironmentGroup:
        """Create environments. An environment's session starts with its first reset.

        Raises:
            EndpointError: `invalid_request`, `session_limit` or `capacity`, or an image is invalid.
        """
        manager = self.manager
        info = manager.info
        manager.drain.check_new()
        if self._sweeper is None:
            self._sweeper = manager.spawn_background(self._sweep())
        await self._close_idle()
        self._check_room(client, request)
        info.check_size(request.height or info.height, request.width or info.width)
        info.check_image(request.image is not None, "image")
        info.check_images(request.images)
        image, images = await manager.off_loop(self._load, request)
        # Check again, because another request may have created environments while the images were
        # being decoded.
        self._check_room(client, request)
        group = EnvironmentGroup(manager, principal, client, request, image, images)
        self._groups[principal, group.id] = group
        manager.held.total += group.nbytes
        return group

    def _check_room(self, client: str, request: CreateRequest) -> None:
        """Check the number of environments against the limits.

        Raises:
            EndpointError: `invalid_request`, `session_limit` or `capacity`.
        """
        info, limits = self.manager.info, self.manager.limits
        if request.num_envs > info.max_sessions:
            raise EndpointError(
                "invalid_request",
                f"num_envs is at most {info.max_sessions}, the sessions of this server; got "
                f"{request.num_envs}",
                param="num_envs",
            )
        own = [group for group in self._groups.values() if group.client == client]
        if sum(group.request.num_envs for group in own) + request.num_envs > (
            limits.sessions_per_client
        ):
            raise EndpointError(
                "session_limit",
                f"you may have {limits.sessions_per_client} environments; close some",
            )
        taken = sum(group.request.num_envs for group in self._groups.values())
        if taken + request.num_envs > info.max_sessions or self.manager.is_over_budget:
            raise EndpointError(
                "capacity",
                f"{taken} of {info.max_sessions} environments are in use; try again later",
            )

    def _load(self, request: CreateRequest) -> tuple[np.ndarray | None, dict[str, np.ndarray]]:
        """Decode a request's images at their original sizes, as the model expects them."""
        limits = self.manager.limits
        for name, source in (("image", request.image), *request.images.items()):
            if source is not None and not isinstance(source, str):
                raise EndpointError("invalid_image", f"{name} must be a data: URL", param="image")
        image = None if request.image is None else np.array(read_image(request.image, limits))
        # The session adds the tensor names later, so only the names in the request are needed here.
        named = load_named_images(request.images, limits)
        return image, dict(zip(request.images, named.values(), strict=True))

    def find(self, principal: str, group_id: str) -> EnvironmentGroup:
        """Return a client's environment group.

        Raises:
            ApiError: Status 404 if the client has no environment group with this id.
        """
        group = self._groups.get((principal, group_id))
        if group is None:
            raise not_found(
                "you have no such environments here; they are closed after "
                f"{self.manager.info.session_idle_s:g} s without a request",
                code="unknown_environment",
            )
        return group

    async def close(self, group: EnvironmentGroup) -> None:
        """Free a group's environments. Idempotent."""
        if self._groups.pop((group.principal, group.id), None) is not None:
            self.manager.held.total -= group.nbytes
            await group.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.manager.info.session_idle_s / 4))
            await self._close_idle()

    async def _close_idle(self) -> None:
        """Free the environment groups that have not been used for `session_idle_s`."""
        latest_s = time.monotonic() - self.manager.info.session_idle_s
        for group in list(self._groups.values()):
            if not group.is_busy and group.last_used_s < latest_s:
                await self.close(group)
