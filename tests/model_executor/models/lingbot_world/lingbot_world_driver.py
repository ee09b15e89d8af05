# SPDX-License-Identifier: Apache-2.0
"""Drives a `LingBotWorld` model chunk by chunk in this process, as the runner does, without an
engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import Result, run_request

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, SessionState
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.lingbot_world.config import CONVENTIONS, LingBotOptions
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld, WorldSetup

HEIGHT, WIDTH = 32, 48


def load_world(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    kind: type[LingBotWorld] = LingBotWorld,
    **options: Any,
) -> LingBotWorld:
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options)
    layout = find_layout(checkpoint)
    values = hf_config(checkpoint)["lingbot_world"]
    setup = WorldSetup.of_checkpoint(
        values, layout, omni, dtype, parallel or ParallelContext(), kv_dtype=kv_dtype
    )
    world = kind(setup)
    world.load_checkpoint(layout)
    return world


@contextmanager
def choosing(**choices: Any) -> Iterator[LingBotOptions]:
    """Yield options that differ from the `realtime` convention only in the given choices. The
    choices are patched in, because no existing convention combines them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONVENTIONS, "realtime", replace(CONVENTIONS["realtime"], **choices))
        yield LingBotOptions()


def start_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (HEIGHT, WIDTH, 3), dtype=torch.uint8, generator=generator)


def make_request(
    world: LingBotWorld,
    session: SessionState,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> DiffusionRequest:
    """Return the request for a chunk. By default, the camera moves forward. A first chunk's request
    contains an image.
    """
    tensors = dict(tensors or {})
    if session.chunk_index == 0 and "image" not in tensors:
        tensors["image"] = start_image()
    if "poses" not in tensors:
        params.setdefault("actions", [["w"], ["w", "j"], ["i"]])
    params = {"session_id": session.session_id, **params}
    return DiffusionRequest("request", DiffusionParams(**params), tensors, session)


def run_chunk(
    world: LingBotWorld,
    session: SessionState,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> Result:
    return run_request(world, make_request(world, session, tensors, **params))


def open_session(world: LingBotWorld, session_id: str = "a", **params: Any) -> SessionState:
    return world.new_session(
        DiffusionParams(session_id=session_id, **{"prompt": "a beach", **params})
    )
