# SPDX-License-Identifier: Apache-2.0
"""A diffusion request's parameters and tensors, and how stock vLLM transports them.

Scalars and text are sent as JSON types in `PoolingParams.extra_kwargs["omni"]`. Tensors are packed
into an envelope (`outputs.py`), which is sent as bytes in `extra_kwargs["omni_tensors"]`. vLLM
cannot serialize a NumPy array in `extra_kwargs`, so such an array would crash the engine.
`extra_kwargs` works with every vLLM entry point: `LLM.encode`, `AsyncLLM.encode` and Ray. Clients,
endpoints and examples build requests with this module, and the runner parses requests with it.
"""

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch

from vllm_omni.actions import MAX_ENTRIES, ActionEntry
from vllm_omni.outputs import RequestFailed, pack_bytes, unpack
from vllm_omni.seeds import Seed, check_seed

if TYPE_CHECKING:
    from vllm import PoolingParams

PARAMS_KEY = "omni"
"""Key of the request's parameters in `PoolingParams.extra_kwargs`."""
_TENSORS_KEY = "omni_tensors"

SessionId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")]
Pixels = Annotated[int, msgspec.Meta(ge=8, le=8192)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Output = Literal["rgb", "latents", "both"]
Text = Annotated[str, msgspec.Meta(max_length=16384)]


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A LoRA adapter that a request uses."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """Name of the adapter on the server."""
    scale: Annotated[float, msgspec.Meta(ge=-100, le=100)] = 1.0
    """Strength of the adapter. 1 is the strength at which the adapter was trained."""


class UsedLora(Lora, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A LoRA adapter applied to a chunk."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """Hash of the tensors and strengths in the adapter's files and of the storage dtype."""


Loras = Annotated[list[Lora], msgspec.Meta(max_length=16)]
UsedLoras = Annotated[list[UsedLora], msgspec.Meta(max_length=16)]


class DiffusionParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """All parameters of a diffusion request except tensors.

    `negative_prompt`, `num_frames`, `num_inference_steps`, `guidance_scale`, `num_images` and `fps`
    are for image and video models; the model determines their defaults. A model refuses parameters
    that it does not use (`refuse_unused`).
    """

    session_id: SessionId
    """Id of the session that the request belongs to."""
    op: Literal["generate", "reset", "close", "fork"] = "generate"
    """Operation to perform. `generate` generates the next chunk. `reset`, `close` and `fork` act on
    the session and return only metadata.
    """
    chunk_index: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Index that the client expects the next chunk to have, or None to accept any index."""
    prompt: Text | None = None
    """Text prompt. Required for the first chunk of a session. A prompt in the request for a later
    chunk replaces the session's prompt from that chunk on.
    """
    seed: Seed | None = None
    """Random seed for the noise."""
    height: Pixels | None = None
    """Frame height in pixels. The first chunk's value applies to the whole session."""
    width: Pixels | None = None
    """Frame width in pixels. The first chunk's value applies to the whole session."""
    actions: Annotated[list[ActionEntry], msgspec.Meta(max_length=MAX_ENTRIES)] | None = None
    """Controls for the chunk, one entry per latent frame: names of held buttons, or an
    `ActionFrame`. The model's `ActionSpace` lists the controls. Mutually exclusive with a `poses`
    tensor.
    """
    output: Output = "rgb"
    """Which tensors the result contains: `rgb` returns uint8 frames `[T, H, W, 3]`, `latents`
    returns the model's unmodified latents, and `both` returns both. `both` requires a streaming
    model.
    """
    trajectory: bool = False
    """Whether the result also contains the latents before each denoise step and the
    log-probabilities of the samples that the sampler draws. Requires a model that implements
    `SupportsTrajectory` and has a stochastic sampler.
    """
    window_frames: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """A chunk's attention window in latent frames, including the chunk and the sink frames. The
    first chunk's value applies to the whole session. Default and maximum: the server's window.
    Requires a model that implements `SupportsSessionWindows`.
    """
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    """Number of the session's first latent frames that remain in the window. The first chunk's
    value applies to the whole session. Default: the server's value. Requires a model that
    implements `SupportsSessionWindows`.
    """
    fork_to: SessionId | None = None
    """Id of the new session that `op="fork"` creates."""
    one_shot: bool = False
    """Whether to create the session for this request only and close it afterwards, even after a
    failure. Requests for a single image or video use this.
    """
    negative_prompt: Text | None = None
    """Text that classifier-free guidance steers away from."""
    num_frames: Count | None = None
    """Length of the video in pixel frames."""
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    """Number of denoise steps."""
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """Classifier-free guidance scale."""
    num_images: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Number of images to generate."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    """Frame rate of the video in frames per second."""
    deadline_s: Seconds | None = None
    """Time in seconds from the request's arrival at the engine to its deadline. Used only with
    deadline scheduling (`omni.scheduling`).
    """
    chunk_period_s: Seconds | None = None
    """Seconds between two consecutive chunks of the stream. Used only with deadline scheduling
    (`omni.scheduling`)."""
    lora: Loras | None = None
    """LoRA adapters to use, starting with this chunk. Several adapters may be active at once. An
    empty list removes all adapters. None keeps the session's adapters; a new session has none.
    """
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Model-specific options. The model validates them."""

    def __post_init__(self) -> None:
        if self.seed is not None:  # requests for later chunks have no seed and can skip the check
            check_seed(self.seed)

    def to_pooling_params(
        self, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> "PoolingParams":
        """Return a vLLM `PoolingParams` instance that contains this request.

        Args:
            tensors: Input tensors on the CPU, by name. Their data is copied.
        """
        extra_kwargs: dict[str, Any] = {PARAMS_KEY: msgspec.to_builtins(self)}
        if tensors:
            extra_kwargs[_TENSORS_KEY] = pack_bytes({}, tensors)
        return _stock()[0](task="plugin", extra_kwargs=extra_kwargs)

    @classmethod
    def from_extra_kwargs(cls, extra_kwargs: Mapping[str, Any] | None) -> "DiffusionParams":
        """Parse the request in `PoolingParams.extra_kwargs`.

        Raises:
            RequestFailed: The request is invalid (code `invalid_request`). The message names the
                field and its range.
        """
        if not extra_kwargs or PARAMS_KEY not in extra_kwargs:
            raise RequestFailed(
                "invalid_request",
                f"extra_kwargs must have the key {PARAMS_KEY!r} with the request's fields",
            )
        try:
            return msgspec.convert(extra_kwargs[PARAMS_KEY], cls)
        except msgspec.ValidationError as error:
            raise RequestFailed("invalid_request", str(error)) from error


_CONTENT = (
    *(
        "prompt",
        "seed",
        "height",
        "width",
        "actions",
        "negative_prompt",
        "num_frames",
        "num_inference_steps",
    ),
    *("guidance_scale", "num_images", "fps"),
)
"""Fields of `DiffusionParams` that determine the result's content."""


def refuse_unused(params: DiffusionParams, used: Collection[str]) -> None:
    """Refuse parameters that a client sent but the model would ignore.

    Args:
        params: Request parameters.
        used: Fields of `_CONTENT` that the model supports.

    Raises:
        RequestFailed: The client has sent unsupported fields (code `invalid_request`). The message
            names them.
    """
    defaults = {"num_images": 1}
    sent = [
        name
        for name in _CONTENT
        if name not in used and getattr(params, name) != defaults.get(name)
    ]
    if sent:
        raise RequestFailed(
            "invalid_request", f"this model does not use {', '.join(sent)}: leave it out"
        )


def engine_prompt() -> Any:
    """Return the prompt that all diffusion requests share: a single token, because vLLM schedules
    tokens.

    The request's content is in its pooling parameters.
    """
    return _stock()[1](prompt_token_ids=[0])


@functools.cache
def _stock() -> "tuple[type[PoolingParams], Callable[..., Any]]":
    """Import the vLLM classes and functions needed to build a request. The result is cached,
    because even a repeated import takes a microsecond.
    """
    from vllm.inputs import tokens_input
    from vllm.pooling_params import PoolingParams

    return PoolingParams, tokens_input


def request_tensors(extra_kwargs: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Return a request's tensors by name.

    Tensors of dtype uint8 (images and videos) share the request's memory and must not be modified.
    Images and videos are not copied, because they are large and models convert them anyway. All
    other tensors are copies.

    Raises:
        RequestFailed: The envelope is malformed (code `invalid_request`).
    """
    packed = (extra_kwargs or {}).get(_TENSORS_KEY)
    if packed is None:
        return {}
    if not isinstance(packed, bytes | bytearray | memoryview) or len(packed) == 0:
        raise RequestFailed(
            "invalid_request",
            f"extra_kwargs[{_TENSORS_KEY!r}] must be bytes written by outputs.pack",
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            tensors = unpack(torch.frombuffer(packed, dtype=torch.uint8))[1]
    except ValueError as error:
        raise RequestFailed(
            "invalid_request", f"the request's tensors are malformed: {error}"
        ) from error
    return {
        name: tensor if tensor.dtype is torch.uint8 else tensor.clone()
        for name, tensor in tensors.items()
    }
