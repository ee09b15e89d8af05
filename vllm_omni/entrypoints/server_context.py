# SPDX-License-Identifier: Apache-2.0
"""`ServerContext`: the objects that the endpoints of one API server process share."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.engine.session_placement import SessionPlacement, num_data_parallel_ranks
from vllm_omni.entrypoints.limits.quotas import Quotas
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
from vllm_omni.entrypoints.realtime.sessions.recorder import SessionRecorder, recording_header
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager

_CODEC_THREADS: Final = 4


@dataclass
class ServerContext:
    """Objects that the endpoints may use after the engine has started.

    Endpoints start in `ENDPOINTS` order. Each endpoint may replace `media_bytes` and append to
    `room_checks`.
    """

    client: EngineClient
    """vLLM's engine client in this API server process."""
    args: Namespace
    """Parsed server arguments."""
    omni: OmniConfig
    """This package's options."""
    limits: EndpointLimits
    """Limits on WebSocket connections and sessions."""
    media_limits: MediaLimits
    """Limits for the image and video routes."""
    threads: Executor
    """Threads that decode images and encode frames."""
    sessions: SessionManager
    """Manager of this process's live sessions. If the model has no sessions, the manager is empty.
    """
    served: ServedModel
    """Names, capabilities and sizes of the served model."""
    engine: OmniEngine
    """Interface for requests and collective calls to the engine."""
    room_checks: list[Callable[[], bool]] = field(default_factory=list)
    """Functions that return whether an endpoint accepts new work. The server accepts new work only
    if all of these functions return True.
    """
    migration: SessionMigration | None = None
    """Saves and restores sessions. None: the model has no sessions."""
    media_bytes: Callable[[], int] = int
    """Function that returns the total size of the stored media files in bytes. The function may
    block, so call it on a worker thread.
    """

    @property
    def is_world(self) -> bool:
        """Whether the model has sessions that clients control while they run."""
        return self.served.capabilities.is_world

    @classmethod
    def create(
        cls,
        client: EngineClient,
        state: State,
        args: Namespace,
        omni: OmniConfig,
        limits: EndpointLimits,
        quotas: Quotas,
    ) -> "ServerContext":
        """Build the context for one API server process.

        Args:
            client: vLLM's engine client.
            state: Application state in which vLLM has stored its served models.
            args: Parsed server arguments.
            omni: This package's options.
            limits: Limits on WebSocket connections and sessions.
            quotas: Client quotas.
        """
        name = args.served_model_name[0] if args.served_model_name else Path(args.model).name
        names = list(dict.fromkeys([*(args.served_model_name or [args.model]), name]))
        placement = SessionPlacement(
            num_data_parallel_ranks(client.vllm_config), offset=os.getpid()
        )
        threads = ThreadPoolExecutor(_CODEC_THREADS, thread_name_prefix="omni-codec")
        recorder = None
        if omni.record_dir is not None:
            recorder = SessionRecorder(Path(omni.record_dir), recording_header(client.vllm_config))
        sessions = SessionManager(
            SessionEngine(client, placement, recorder),
            StreamInfo.from_vllm_config(client.vllm_config, model=name),
            limits,
            threads,
            args.allowed_origins,
            quotas,
        )
        # vLLM lists these adapters at /v1/models and stores them before it starts endpoint plugins.
        adapters = state.openai_serving_models.lora_requests
        sessions.adapters = lambda: adapters
        sessions.server_name = omni.server_name
        served = replace(
            ServedModel.from_vllm_config(client.vllm_config, names), adapters=lambda: adapters
        )
        return cls(
            client=client,
            args=args,
            omni=omni,
            limits=limits,
            media_limits=read_struct(MediaLimits),
            threads=threads,
            sessions=sessions,
            served=served,
            engine=OmniEngine(client, placement),
        )


class ServerEndpoint(Protocol):
    """An endpoint in the `ENDPOINTS` table. It starts in two steps because vLLM builds the
    application before it passes the engine client to plugins.
    """

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        """Add the routes while vLLM builds the application.

        Returns:
            Paths that clients may request without an API key.
        """
        ...

    async def start_serving(self, server: ServerContext) -> None:
        """Prepare for requests. This method is called once, after engine startup and before the
        server listens.
        """
        ...
