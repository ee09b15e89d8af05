# SPDX-License-Identifier: Apache-2.0
"""`OpenAIRoutes`: the OpenAI-compatible routes and their OpenAPI description.

The routes parse request bodies themselves because some routes accept both JSON and forms, and
because errors must have OpenAI's format. As a result, FastAPI cannot derive the body schemas. This
module generates them from the pydantic models that validate the bodies.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.openai.chat import ChatRoutes
from vllm_omni.entrypoints.openai.chat_request import ChatRequest
from vllm_omni.entrypoints.openai.client_threads import ClientThreads
from vllm_omni.entrypoints.openai.images import ImageRoutes
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.protocol import (
    ErrorReply,
    ImageEditRequest,
    ImageGenerationRequest,
    ImagesReply,
    Video,
    VideoDeleted,
    VideoList,
    VideoRequest,
)
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.routes import VideoRoutes
from vllm_omni.entrypoints.openai.videos.store import MediaStore
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.server_context import ServerContext

Route = Callable[..., Awaitable[Response]]

SERVED_PATH: Final = "/v1/omni/served"
_BINARY: Final = {"type": "string", "contentMediaType": "application/octet-stream"}
_REFERENCE: Final = {
    "type": "object",
    "properties": {
        "image_url": {"type": "string", "description": "A data: URL of a PNG, JPEG, WebP or GIF."}
    },
    "required": ["image_url"],
    "additionalProperties": False,
}
_CLIP: Final = {
    "type": "object",
    "properties": {
        "video_url": {
            "type": "string",
            "description": "A data: URL of an MP4 or WebM: the clip to edit.",
        }
    },
    "required": ["video_url"],
    "additionalProperties": False,
}
_LIST_PARAMETERS: Final = [
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    },
    {
        "name": "order",
        "in": "query",
        "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    },
    {
        "name": "after",
        "in": "query",
        "schema": {"type": "string"},
        "description": "Id of the last video of the previous page.",
    },
]
_VARIANT_PARAMETER: Final = {
    "name": "variant",
    "in": "query",
    "schema": {"type": "string", "enum": ["video", "thumbnail", "spritesheet"], "default": "video"},
}


class OpenAIRoutes:
    """The OpenAI-compatible routes of one API server process."""

    def __init__(self) -> None:
        self._images: ImageRoutes | None = None
        self._videos: VideoRoutes | None = None
        self._chat: ChatRoutes | None = None

    async def start_serving(self, server: ServerContext) -> None:
        jobs = self.connect_engine(
            server.engine,
            server.served,
            server.media_limits,
            server.limits,
            server.threads,
            server.omni.server_name,
        )
        server.room_checks.append(lambda: not (jobs.is_full or self.images.is_full))
        server.media_bytes = jobs.store.nbytes

    def connect_engine(
        self,
        engine: OmniEngine,
        served: ServedModel,
        limits: MediaLimits,
        endpoint_limits: EndpointLimits,
        executor: Executor,
        server_name: str | None = None,
    ) -> VideoJobs:
        """Connect the routes to the engine before the server listens.

        Args:
            engine: Engine that runs the requests.
            served: Names, capabilities and sizes of the served model.
            limits: Limits for these routes.
            endpoint_limits: Limits that these routes share with the WebSocket endpoints, for
                example image size limits.
            executor: Threads that decode and encode media.
            server_name: Value of `omni.server_name`.

        Returns:
            This process's video jobs.
        """
        self.served = served
        store = MediaStore(limits, server_name)
        jobs = VideoJobs(engine, served, store, limits, executor)
        threads = ClientThreads(executor)
        self._images = ImageRoutes(engine, served, store, limits, endpoint_limits, threads)
        self._videos = VideoRoutes(jobs, served, limits, endpoint_limits, threads)
        self._chat = ChatRoutes(engine, served, limits, endpoint_limits, threads)
        return jobs

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        app.add_api_route(SERVED_PATH, self._served_model, methods=["GET"], include_in_schema=False)
        add = partial(_add, app)
        add(
            "/v1/images/generations",
            self._generations,
            body={"application/json": _schema(ImageGenerationRequest)},
            reply=ImagesReply,
            media_types=("text/event-stream",),
        )
        images = {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": 16}
        add(
            "/v1/images/edits",
            self._edits,
            body={
                "multipart/form-data": _schema(
                    ImageEditRequest, {"image": images, "mask": _BINARY}, ("image",)
                ),
                "application/json": _schema(
                    ImageEditRequest,
                    {"images": {"type": "array", "items": _REFERENCE, "minItems": 1}},
                    ("images",),
                ),
            },
            reply=ImagesReply,
            media_types=("text/event-stream",),
        )
        add(
            "/v1/files/{file_id}/content",
            self._file_content,
            "GET",
            media_types=("image/png", "image/jpeg", "image/webp"),
        )
        add(
            "/v1/chat/completions",
            self._chat_completions,
            body={"application/json": _schema(ChatRequest)},
            media_types=("application/json", "text/event-stream"),
        )
        add(
            "/v1/videos",
            self._create_video,
            body={
                "application/json": _schema(
                    VideoRequest,
                    {
                        "input_reference": {"oneOf": [_REFERENCE, _CLIP, {"type": "null"}]},
                        "images": {"type": "object", "additionalProperties": _REFERENCE},
                    },
                ),
                "multipart/form-data": _schema(
                    VideoRequest, {"input_reference": _BINARY, "images[NAME]": _BINARY}
                ),
            },
            reply=Video,
        )
        add("/v1/videos", self._list_videos, "GET", reply=VideoList, parameters=_LIST_PARAMETERS)
        add("/v1/videos/{video_id}", self._retrieve_video, "GET", reply=Video)
        add("/v1/videos/{video_id}", self._delete_video, "DELETE", reply=VideoDeleted)
        add("/v1/videos/{video_id}/cancel", self._cancel_video, reply=Video)
        add(
            "/v1/videos/{video_id}/content",
            self._video_content,
            "GET",
            media_types=("video/mp4", "image/webp", "image/jpeg"),
            parameters=[_VARIANT_PARAMETER],
        )
        return ()

    # vLLM adds routes before engine startup, so these methods look up their handlers at each call.

    @property
    def images(self) -> ImageRoutes:
        assert self._images is not None, "vLLM initialises state before it serves"
        return self._images

    @property
    def videos(self) -> VideoRoutes:
        assert self._videos is not None, "vLLM initialises state before it serves"
        return self._videos

    async def _served_model(self) -> Response:
        """Return the model's name and tasks, which the web page shows if the model has no
        sessions.
        """
        capabilities = self.served.capabilities
        reported = {
            "model": self.served.names[0],
            "tasks": capabilities.tasks,
            "reads": capabilities.reads,
        }
        return JSONResponse(reported, headers={"Cache-Control": "no-store"})

    async def _generations(self, request: Request) -> Response:
        """Generate images from text."""
        return await self.images.generations(request)

    async def _edits(self, request: Request) -> Response:
        """Generate images from images and text."""
        return await self.images.edits(request)

    async def _file_content(self, request: Request, file_id: str) -> Response:
        """Download an image that was generated with `response_format` `url`."""
        return await self.images.file_content(request, file_id)

    async def _chat_completions(self, request: Request) -> Response:
        """Generate text from text, an image or a video."""
        assert self._chat is not None, "vLLM initialises state before it serves"
        return await self._chat.completions(request)

    async def _create_video(self, request: Request) -> Response:
        """Start a video job, and return without waiting for it."""
        return await self.videos.create(request)

    async def _list_videos(self, request: Request) -> Response:
        """List the client's video jobs, newest first."""
        return await self.videos.list_jobs(request)

    async def _retrieve_video(self, request: Request, video_id: str) -> Response:
        """Retrieve a video job and its progress."""
        return await self.videos.retrieve(request, video_id)

    async def _delete_video(self, request: Request, video_id: str) -> Response:
        """Delete a video job. A running job stops before its next denoise step."""
        return await self.videos.delete(request, video_id)

    async def _cancel_video(self, request: Request, video_id: str) -> Response:
        """Stop a video job before its next denoise step, but retain its record."""
        return await self.videos.cancel(request, video_id)

    async def _video_content(self, request: Request, video_id: str) -> Response:
        """Download the finished MP4 (supports `Range`), its thumbnail or a sprite sheet."""
        return await self.videos.content(request, video_id)


def _add(
    app: FastAPI,
    path: str,
    route: Route,
    method: str = "POST",
    *,
    body: dict[str, dict[str, Any]] | None = None,
    reply: type[BaseModel] | None = None,
    media_types: Sequence[str] = (),
    parameters: Sequence[dict[str, Any]] = (),
) -> None:
    extra: dict[str, Any] = {}
    if body is not None:
        content = {media_type: {"schema": schema} for media_type, schema in body.items()}
        extra["requestBody"] = {"required": True, "content": content}
    if parameters:
        extra["parameters"] = list(parameters)
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": ErrorReply, "description": "The request was refused."},
        "5XX": {"model": ErrorReply, "description": "The server failed."},
    }
    success: dict[str, Any] = {"description": "Success"}
    if reply is not None:
        success["model"] = reply
    if media_types:
        success["content"] = {
            media_type: {"schema": {} if media_type == "text/event-stream" else _BINARY}
            for media_type in media_types
        }
    app.add_api_route(
        path,
        route,
        methods=[method],
        response_class=Response,
        response_model=None,
        responses={200: success, **errors},
        openapi_extra=extra or None,
        tags=["omni"],
    )


def _schema(
    model: type[BaseModel], more: dict[str, Any] | None = None, required: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the JSON schema of a pydantic model, extended with the properties in `more` and the
    required fields in `required`.
    """
    schema = model.model_json_schema()
    schema["properties"] = {**schema["properties"], **(more or {})}
    schema["required"] = [*schema.get("required", ()), *required]
    return schema
