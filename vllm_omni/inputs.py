# SPDX-License-Identifier: Apache-2.0
"""A client's diffusion request: its parameters and tensors, and how they travel through stock vLLM.

Scalars and text travel in `PoolingParams.extra_kwargs["omni"]` as JSON types, tensors in
`extra_kwargs["omni_tensors"]` as the bytes of an envelope (an array there would kill the engine). This one channel
works through every stock entry point: `LLM.encode`, `AsyncLLM.encode`, Ray. Clients, doors and examples build requests
with this file; the runner reads them with it. Held by tests/test_inputs.py.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch

from vllm_omni.actions import MAX_ENTRIES, ActionEntry
from vllm_omni.outputs import RequestFailed, pack, unpack
from vllm_omni.seeds import Seed, check_seed

if TYPE_CHECKING:
    from vllm import PoolingParams

PARAMS_KEY = "omni"
"""Key of the request in `PoolingParams.extra_kwargs`."""
_TENSORS_KEY = "omni_tensors"

SessionId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")]
Pixels = Annotated[int, msgspec.Meta(ge=8, le=8192)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Output = Literal["rgb", "latents", "both"]
Text = Annotated[str, msgspec.Meta(max_length=16384)]


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A LoRA adapter by the name that the server gave it. scale: its strength, 1 = as it was trained."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    scale: Annotated[float, msgspec.Meta(ge=-100, le=100)] = 1.0


class UsedLora(Lora, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An adapter as a chunk used it. digest: of its files' tensors and strengths, and of the type it is kept in."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


Loras = Annotated[list[Lora], msgspec.Meta(max_length=16)]
UsedLoras = Annotated[list[UsedLora], msgspec.Meta(max_length=16)]


class DiffusionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Everything of one diffusion request that is not a tensor.

    op: `generate` runs the next chunk; `reset`, `close` and `fork` act on the session and return only metadata.
    chunk_index: the chunk the client expects to be next; None accepts whichever is next.
    prompt: required on a session's first chunk; later, a new prompt from this chunk on.
    actions: one entry per latent frame, names of held buttons or an `ActionFrame`; the model's `ActionSpace` says
    which it takes. Instead of a `poses` tensor.
    height, width: pixels, fixed for the session by its first chunk. output: `rgb` = uint8 frames
    `[T, H, W, 3]`, `latents` = the model's latents as they are, `both` = both, of streaming models.
    window_frames, sink_frames: latent frames that a chunk of this session sees, itself and the sinks included, and the
    first frames that it always sees; fixed by the first chunk, None = the server's. At most the server's window, and
    only of models that are `SupportsSessionWindows`.
    fork_to: the new session's id, for `op="fork"`.
    one_shot: the session is made for this request and closed with it, however it ends (one image, one video).
    negative_prompt, num_frames (pixel frames), num_inference_steps, guidance_scale, num_images, fps: for image and
    video models; None = the model's default, and a model refuses parameters it does not use (`refuse_unused`).
    deadline_s: seconds after the engine has received the request by which its result is wanted; chunk_period_s: the
    stream wants a chunk that often. Both only matter to a server that schedules by deadline (`omni.scheduling`).
    lora: adapters from this chunk on, several at once; [] = none, None = as the session has them (at first: none).
    options: model-specific, checked by the model.
    """

    session_id: SessionId
    op: Literal["generate", "reset", "close", "fork"] = "generate"
    chunk_index: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prompt: Text | None = None
    seed: Seed | None = None
    height: Pixels | None = None
    width: Pixels | None = None
    actions: Annotated[list[ActionEntry], msgspec.Meta(max_length=MAX_ENTRIES)] | None = None
    output: Output = "rgb"
    window_frames: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    fork_to: SessionId | None = None
    one_shot: bool = False
    negative_prompt: Text | None = None
    num_frames: Count | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    num_images: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    deadline_s: Seconds | None = None
    chunk_period_s: Seconds | None = None
    lora: Loras | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed is not None:  # later chunks bring none: a call less for each
            check_seed(self.seed)

    def to_pooling_params(self, tensors: Mapping[str, torch.Tensor] | None = None) -> "PoolingParams":
        """Return stock `PoolingParams` carrying this request and its input tensors (on CPU, copied)."""
        extra_kwargs: dict[str, Any] = {PARAMS_KEY: msgspec.to_builtins(self)}
        if tensors:
            extra_kwargs[_TENSORS_KEY] = pack({}, tensors).numpy().tobytes()
        return _stock()[0](task="plugin", extra_kwargs=extra_kwargs)

    @classmethod
    def from_extra_kwargs(cls, extra_kwargs: Mapping[str, Any] | None) -> "DiffusionParams":
        """Read the request back; raises `RequestFailed("invalid_request", ...)` naming the field and range."""
        if not extra_kwargs or PARAMS_KEY not in extra_kwargs:
            raise RequestFailed(
                "invalid_request", f"extra_kwargs must hold the key {PARAMS_KEY!r} with the request's fields"
            )
        try:
            return msgspec.convert(extra_kwargs[PARAMS_KEY], cls)
        except msgspec.ValidationError as error:
            raise RequestFailed("invalid_request", str(error)) from error


_CONTENT = (
    *("prompt", "seed", "height", "width", "actions", "negative_prompt", "num_frames", "num_inference_steps"),
    *("guidance_scale", "num_images", "fps"),
)
"""Fields of `DiffusionParams` that describe the result."""


def refuse_unused(params: DiffusionParams, used: Collection[str]) -> None:
    """Refuse parameters that were sent and would have no effect.

    Args:
        params: The request.
        used: The model's own among the fields that describe the result (`_CONTENT`).

    Raises:
        RequestFailed: `invalid_request` that names the fields.
    """
    defaults = {"num_images": 1}
    sent = [name for name in _CONTENT if name not in used and getattr(params, name) != defaults.get(name)]
    if sent:
        raise RequestFailed("invalid_request", f"this model does not use {', '.join(sent)}: leave it out")


def engine_prompt() -> Any:
    """Return the prompt of every diffusion request: one token to schedule; everything else is in the params."""
    return _stock()[1](prompt_token_ids=[0])


@functools.cache
def _stock() -> "tuple[type[PoolingParams], Callable[..., Any]]":
    """The parts of vLLM that a request needs, imported with the first one: a repeated import takes a microsecond."""
    from vllm.inputs import tokens_input
    from vllm.pooling_params import PoolingParams

    return PoolingParams, tokens_input


def request_tensors(extra_kwargs: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Return the named tensors of a request; raises `RequestFailed("invalid_request", ...)` if they are malformed."""
    packed = (extra_kwargs or {}).get(_TENSORS_KEY)
    if packed is None:
        return {}
    if not isinstance(packed, bytes | bytearray | memoryview) or len(packed) == 0:
        raise RequestFailed("invalid_request", f"extra_kwargs[{_TENSORS_KEY!r}] must be bytes written by outputs.pack")
    try:
        # The bytes are read-only and shared; the copy is the request's own.
        return unpack(torch.frombuffer(bytearray(packed), dtype=torch.uint8))[1]
    except ValueError as error:
        raise RequestFailed("invalid_request", f"the request's tensors are malformed: {error}") from error
