# SPDX-License-Identifier: Apache-2.0
"""Checks of a request that are the same for every streaming model. Each raises `RequestFailed` and changes nothing.

Held by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py and
tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.streaming.session import SessionShape
from vllm_omni.outputs import RequestFailed

DEFAULT_SEED = 0


class Sized(Protocol):
    """A network that makes pictures of some sizes only."""

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Raises ValueError that names the sizes it makes."""
        ...


def read_size(params: DiffusionParams, config: Sized, omni: OmniConfig) -> tuple[int, int]:
    """Return (height, width) that a session's first chunk asks for."""
    height = omni.height if params.height is None else params.height
    width = omni.width if params.width is None else params.width
    try:
        config.latent_size(height, width)
    except ValueError as error:
        raise RequestFailed("unsupported_size", str(error)) from error
    if height * width > omni.max_area:
        raise RequestFailed(
            "unsupported_size",
            f"{height}x{width} has {height * width} pixels; this server makes at most {omni.max_area}",
        )
    return height, width


def check_unchanged(params: DiffusionParams, shape: SessionShape, others: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse another value for a field that the first chunk fixed. others: a model's own, name -> (sent, fixed)."""
    fixed_by_all = {
        "height": (params.height, shape.height),
        "width": (params.width, shape.width),
        "output": (params.output, shape.output),
    }
    for name, (sent, fixed) in {**fixed_by_all, **others}.items():
        if sent is not None and sent != fixed:
            raise RequestFailed(
                "invalid_request", f"{name} is fixed at {fixed} by the session's first chunk, got {sent}"
            )
