# SPDX-License-Identifier: Apache-2.0
"""The default video size in the engine, the endpoints and `plan` is the size that the model was
trained at.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.checkpoints.make_world import write_world
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.planning.models import model_of
from vllm_omni.testing.tiny.waypoint import CONFIGS
from vllm_omni.worlds.description import CARD


def engine_config(model: Path, omni: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model),
        config_format="omni",
        skip_tokenizer_init=True,
        additional_config={"omni": omni},
    )
    return arguments.create_engine_config()


@pytest.mark.parametrize(
    ("name", "layout", "size"),
    [("matrix_game", "original", (352, 640)), ("waypoint", "v1_5", (88, 160))],
)
def test_a_model_is_served_at_the_size_it_was_trained_at(
    tmp_path: Path, name: str, layout: str, size: tuple[int, int]
) -> None:
    """The engine, the endpoints and the page use the size that the model was trained at, unless an
    option sets a different size.
    """
    model, family = tmp_path / "model", get_family(name)
    family.make_tiny(model, 0, layout)
    config = engine_config(model, {"max_sessions": 2})
    omni = OmniConfig.from_additional_config(config.additional_config)
    assert (omni.height, omni.width, omni.max_sessions) == (*size, 2)
    info, served = (
        StreamInfo.from_vllm_config(config, "m"),
        ServedModel.from_vllm_config(config, ["m"]),
    )
    assert (info.height, info.width) == (served.height, served.width) == size
    serve.check(serve.ServeFlags.scan([str(model), "--port", "0"]))


@pytest.mark.parametrize(
    ("layout", "cells", "size"),
    [("v1_5", (16, 32), (720, 1280)), ("v1_5", (8, 16), (360, 640)), ("v1", (16, 16), (360, 640))],
)
def test_waypoint_frames_are_16_to_9(
    layout: str, cells: tuple[int, int], size: tuple[int, int]
) -> None:
    """The native size of a Waypoint model is derived from the grid in its checkpoint. It is one of
    two sizes with an aspect ratio of 16:9.
    """
    height, width = cells
    grid = {"height": height, "width": width, "tokens_per_frame": height * width}
    assert WaypointConfig.from_checkpoint({**CONFIGS[layout], **grid}).native_size == size


@pytest.mark.parametrize(
    ("name", "size"), [("matrix_game", (352, 640)), ("causal_wan_1_3b", (480, 832))]
)
def test_the_planner_uses_the_same_size(name: str, size: tuple[int, int]) -> None:
    model = model_of(name)
    assert (model.height, model.width) == size
    assert model_of(name, height=64).height == 64


def test_the_planner_uses_the_settings_of_the_world_description(tmp_path: Path) -> None:
    """The planner uses the same settings as a server for the same checkpoint directory, unless an
    argument overrides them.
    """
    write_world(tmp_path / "world")
    model = model_of(str(tmp_path / "world"))
    assert (model.height, model.width) == (96, 160)
    assert model_of(str(tmp_path / "world"), height=64).height == 64
    description = tmp_path / "world" / CARD
    options = {"window_frames": 12, "sink_frames": 3, "latent_frames_per_chunk": 1}
    description.write_text(json.dumps({**json.loads(description.read_text()), "model": options}))
    model = model_of(str(tmp_path / "world"), window=9)
    assert (model.window, model.sinks, model.chunk) == (9, 3, 1)
