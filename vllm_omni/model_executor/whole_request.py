# SPDX-License-Identifier: Apache-2.0
"""`WholeRequestModel`: serves a model that does not implement `SupportsStepExecution`, one request
per engine step.

The served model has one method that computes the whole result of a request:

    sample | forward | diffuse (params: DiffusionParams, tensors: Mapping[str, Tensor]) -> (meta,
    tensors)

The method names are tried in the order of `METHODS`. Methods inherited from `torch.nn.Module` or
`StepPipeline` are ignored. The input tensors are on the CPU; the result may be on any device. If
the method raises `RequestFailed`, the client receives this error unchanged. A method named
`forward` must accept `**kwargs`, because vLLM rejects classes with a `forward` that does not accept
vLLM's keyword arguments.

Limitations: an abort takes effect only when the request in progress is complete, requests are not
batched, and only one pipeline stage is supported. A model with separate denoise steps should
implement `SupportsStepExecution`.
"""

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    Inputs,
    Result,
    SupportsStepExecution,
)
from vllm_omni.model_executor.one_shot import OneShotSession
from vllm_omni.model_executor.vllm_model import StepPipeline
from vllm_omni.outputs import RequestFailed

logger = logging.getLogger("vllm." + __name__)

METHODS = ("sample", "forward", "diffuse")
"""Possible names of the method that runs a request, in the order they are tried."""

_NOMINAL_BYTES = 1
"""Nominal size of a session in bytes. The amount of memory that a request needs is unknown, so only
`omni.max_sessions` limits admission.
"""

Request = DiffusionRequest[OneShotSession, Result]


def find_method(model: nn.Module) -> str:
    """Return the first of `METHODS` that the model's own class defines.

    Raises:
        TypeError: The class defines none of these methods.
    """
    for name in METHODS:
        found = inspect.getattr_static(type(model), name, None)
        inherited = (inspect.getattr_static(base, name, None) for base in (nn.Module, StepPipeline))
        if found is not None and all(found is not base for base in inherited):
            return name
    raise TypeError(
        f"{type(model).__name__} can be served neither in steps (SupportsStepExecution) nor whole: "
        f"it defines none of {', '.join(METHODS)}"
    )


class WholeRequestModel:
    """Adapter that implements `SupportsStepExecution` with one step for a model that computes a
    request in one call.

    Args:
        model: Model that computes a request in one call.
    """

    supports_step_execution: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.method = find_method(model)
        self._run: Callable[[DiffusionParams, Mapping[str, torch.Tensor]], Result] = getattr(
            model, self.method
        )
        logger.info(
            "%s runs whole requests through its method %r", type(model).__name__, self.method
        )

    def session_nbytes(self, params: DiffusionParams) -> int:
        return _NOMINAL_BYTES

    def new_session(self, params: DiffusionParams) -> OneShotSession:
        if not params.one_shot:
            raise RequestFailed("invalid_request", "this model has no sessions: send one_shot")
        if params.output == "both":
            raise RequestFailed(
                "invalid_request",
                "output 'both' requires a streaming model; allowed: 'rgb', 'latents'",
            )
        return OneShotSession(params.session_id, _NOMINAL_BYTES)

    def prepare_encode(self, request: Request) -> None:
        request.num_steps = 1

    def batch_key(self, request: Request) -> Hashable:
        return request.request_id  # unique per request, because the model cannot batch requests

    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        for request in batch:
            request.state = self._run(request.params, request.tensors)
        return self.latents(batch[0])

    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None: ...

    def latents(self, request: Request) -> torch.Tensor:
        """Return sums over the floating-point results. The runner checks these sums for NaN and
        Inf.
        """
        result = request.state[1] if request.state is not None else {}
        sums = [
            tensor.float().sum().cpu() for tensor in result.values() if tensor.is_floating_point()
        ]
        return torch.stack(sums) if sums else torch.zeros(1)

    def set_latents(self, request: Request, latents: torch.Tensor) -> None:
        raise NotImplementedError("a model without steps runs on one pipeline stage")

    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        meta, tensors = request.work
        return dict(meta), dict(tensors)

    def commit(self, request: Request) -> None:
        request.session.chunk_index += 1

    def warmup_inputs(self) -> list[Inputs]:
        """Return the model's own `warmup_inputs()`. A model that does not define this method has no
        warm-up.
        """
        own = inspect.getattr_static(type(self.model), "warmup_inputs", None)
        return [] if own is None else self.model.warmup_inputs()  # type: ignore[operator]


def in_steps(network: nn.Module) -> SupportsStepExecution:
    """Return the model itself if it supports step execution, otherwise a `WholeRequestModel` that
    wraps the model.

    Raises:
        TypeError: The model neither supports step execution nor defines one of `METHODS`.
    """
    if isinstance(network, SupportsStepExecution) and network.supports_step_execution:
        return network
    return WholeRequestModel(network)
