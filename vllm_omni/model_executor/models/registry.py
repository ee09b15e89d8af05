# SPDX-License-Identifier: Apache-2.0
"""The model families this package knows, by name; everything else asks this table instead of naming
a model.

A family is a module `family` that defines `FAMILY`; `vllm_omni.testing.tiny.<name>` writes its tiny
checkpoints. Modules are imported on first use, so that listing families costs nothing.
"""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.checkpoint.root_config import ROOT_MODEL_TYPE
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.planning.stream_model import FamilyPlan

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_omni.actions import ActionSpace
    from vllm_omni.pipeline.speech import SpeechModel

_FAMILY_MODULES = {
    "null_world": "vllm_omni.testing.null.world.family",
    "null_image": "vllm_omni.testing.null.image.family",
    "lingbot_world": "vllm_omni.model_executor.models.lingbot_world.family",
    "causal_wan": "vllm_omni.model_executor.models.causal_wan.family",
    "matrix_game": "vllm_omni.model_executor.models.matrix_game.family",
    "waypoint": "vllm_omni.model_executor.models.waypoint.family",
    "wan2_2": "vllm_omni.model_executor.models.wan2_2.family",
    "lance": "vllm_omni.model_executor.models.lance.family",
    "qwen2_5_omni": "vllm_omni.model_executor.models.qwen2_5_omni.family",
    # Last: it takes any directory in diffusers' layout, also of a model that is served by a worker
    # here.
    "diffusers_pipeline": "vllm_omni.model_executor.models.diffusers_pipeline.family",
}
_ALIASES = (
    dict.fromkeys(
        (
            "lingbot_world_fast",
            "lingbot_world_v2_1_3b",
            "lingbot_world_v2_14b",
            "lingbot_world_v2_14b_diffusers",
            "lingbot_world_v2_14b_pretrain",
        ),
        "lingbot_world",
    )
    | dict.fromkeys(
        (
            *("causvid", "causvid_4_steps", "stream_diffusion_v2", "longlive", "krea_realtime_14b"),
            *("reward_forcing", "rolling_forcing"),
        ),
        "causal_wan",
    )
    | dict.fromkeys(("matrix_game_gta_drive", "matrix_game_templerun"), "matrix_game")
    | dict.fromkeys(("waypoint_360p", "waypoint_1_small", "waypoint_1_1_small"), "waypoint")
    | {"qwen2_5_omni_3b": "qwen2_5_omni"}
)
"""Other names of a family, most of them of its releases (`models/<name>/hub.py`)."""

ARCHITECTURES = {
    "CausalWanPipeline": "vllm_omni.model_executor.models.causal_wan.pipeline:CausalWanPipeline",
    "DiffusersPipeline": "vllm_omni.model_executor.models.diffusers_pipeline.pipeline:"
    "DiffusersPipeline",
    "LancePipeline": "vllm_omni.model_executor.models.lance.pipeline:LancePipeline",
    "LingBotPretrainPipeline": (
        "vllm_omni.model_executor.models.lingbot_world.pretrain:LingBotPretrainPipeline"
    ),
    "LingBotWorldPipeline": "vllm_omni.model_executor.models.lingbot_world.pipeline:"
    "LingBotWorldPipeline",
    "MatrixGamePipeline": "vllm_omni.model_executor.models.matrix_game.pipeline:MatrixGamePipeline",
    "NullImagePipeline": "vllm_omni.testing.null.image.pipeline:NullImagePipeline",
    "NullWorldPipeline": "vllm_omni.testing.null.world.pipeline:NullWorldPipeline",
    "WaypointPipeline": "vllm_omni.model_executor.models.waypoint.pipeline:WaypointPipeline",
    "Wan22Pipeline": "vllm_omni.model_executor.models.wan2_2.pipeline:Wan22Pipeline",
    "Qwen2_5OmniToken2WavPipeline": "vllm_omni.model_executor.models.qwen2_5_omni.token2wav:"
    "Token2WavPipeline",
}
"""vLLM architecture name -> model class, registered lazily with vLLM's `ModelRegistry`."""

AR_ARCHITECTURES = {
    "Qwen2_5OmniTalkerForConditionalGeneration": (
        "vllm_omni.model_executor.models.qwen2_5_omni.talker:TalkerForConditionalGeneration"
    ),
    "VllmOmniQwen2_5OmniThinker": (
        "vllm_omni.model_executor.models.qwen2_5_omni.thinker:ThinkerForConditionalGeneration"
    ),
}
"""The same for autoregressive models: registered, and otherwise left to vLLM's own defaults."""

MODEL_TYPES = (ROOT_MODEL_TYPE, "null_image", "null_world", "t2v")
"""`model_type` in the `config.json` at the root of a directory, by which plain `vllm serve DIR`
finds this package.

`t2v` is the original Wan's.
"""


@dataclass(frozen=True)
class ModelFamily:
    """One family, as the command line and the config parser know it.

    detect: whether a directory holds a checkpoint of this family (any of its layouts); must be
    cheap and not raise.
    why_not: a directory that is not detected -> the reason, in one line; None = it holds nothing
    like this family's.
    hf_config: a directory -> keyword arguments of a `PretrainedConfig` (`architectures`, `dtype`,
    sizes, layout). Raises ValueError with one line when the directory is unusable.
    layouts: the layouts `make_tiny` can write, default first.
    stream_info: (hf_config as a dict, parsed options) -> the fields that differ from the defaults
    of `StreamInfo` (entrypoints/realtime/connection/stream_info.py), e.g. another chunk size.
    action_space: likewise -> the controls that the model takes; None = it takes none.
    capabilities: likewise -> requests of the OpenAI routes that the model takes; None = a world
    started by an image.
    default_size: hf_config as a dict -> (height, width) of a video where neither the user nor the
    world's card names a size; None = `OmniConfig`'s.
    check_options: (hf_config as a dict, parsed options) -> None, or ValueError in one line; must be
    cheap.
    check_parallel: (hf_config as a dict, parsed options, --tensor-parallel-size,
    --pipeline-parallel-size) -> None, or ValueError in one line, before any process starts; None =
    the worker finds out.
    kv_cache_dtypes: those of `--kv-cache-dtype` that sessions can be kept in.
    takes_adapters: whether LoRA adapters are served (`SupportsAdapters`).
    plan: its networks as `vllm-omni plan` sees them; None = they cannot be planned.
    executor_cls: the executor that serves the family in one process, without a worker; None =
    workers.
    serve_flags: (directory, whether on CPU) -> the flags `vllm serve --omni` adds, for a family
    that vLLM serves by an autoregressive engine; None = the diffusion worker's. endpoint_plugins:
    further names in VLLM_PLUGINS.
    start_speech: (directory, options, the server's engine) -> the model, its other engines started;
    for the speech routes, which the plugin `vllm_omni_speech` adds. None = it does not speak.
    Raises ValueError for bad options.
    """

    name: str
    title: str
    architecture: str
    detect: Callable[[Path], bool]
    hf_config: Callable[[Path], dict[str, Any]]
    layouts: tuple[str, ...]
    why_not: Callable[[Path], str | None] | None = None
    default_size: Callable[[dict[str, Any]], tuple[int, int]] | None = None
    check_options: Callable[[dict[str, Any], OmniConfig], None] | None = None
    check_parallel: Callable[[dict[str, Any], OmniConfig, int, int], None] | None = None
    stream_info: Callable[[dict[str, Any], OmniConfig], dict[str, Any]] | None = None
    action_space: Callable[[dict[str, Any], OmniConfig], "ActionSpace"] | None = None
    capabilities: Callable[[dict[str, Any], OmniConfig], Capabilities] | None = None
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    takes_adapters: bool = False
    plan: FamilyPlan | None = None
    executor_cls: str | None = None
    serve_flags: Callable[[Path, bool], dict[str, str]] | None = None
    endpoint_plugins: tuple[str, ...] = ()
    start_speech: Callable[[Path, OmniConfig, "AsyncLLM"], Awaitable["SpeechModel"]] | None = None

    def size_of(self, hf_config: dict[str, Any]) -> tuple[int, int] | None:
        return None if self.default_size is None else self.default_size(hf_config)

    def make_tiny(self, out: Path, seed: int, layout: str) -> None:
        """Write a tiny random checkpoint in a real layout into the empty or new folder `out`,
        for demos and tests.
        """
        importlib.import_module(f"vllm_omni.testing.tiny.{self.name}").make_tiny(out, seed, layout)


def family_names() -> list[str]:
    return list(_FAMILY_MODULES)


def known_names() -> dict[str, str]:
    """Name or alias -> the name of its family."""
    return {name: name for name in _FAMILY_MODULES} | _ALIASES


def get_family(name: str) -> ModelFamily:
    """Return a family by name or alias. Raises ValueError that lists the known ones."""
    name = _ALIASES.get(name, name)
    if name not in _FAMILY_MODULES:
        raise ValueError(
            f"unknown model {name!r}; known: {', '.join([*_FAMILY_MODULES, *_ALIASES])}"
        )
    family = importlib.import_module(_FAMILY_MODULES[name]).FAMILY
    assert isinstance(family, ModelFamily)
    return family


def detect_family(path: Path, executor: str | None = None) -> ModelFamily:
    """Return the family whose checkpoint layout `path` has.

    Raises ValueError that names the layouts looked for.

    executor: the user's `--distributed-executor-backend`. Several families may take a directory;
    the first in the table wins, unless the user names the executor of another one, which then is
    the only one asked.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; pass a local checkpoint directory")
    families = [get_family(name) for name in _FAMILY_MODULES]
    owners = [
        family for family in families if executor is not None and family.executor_cls == executor
    ]
    for family in owners or families:
        if family.detect(path):
            return family
    if owners:
        raise ValueError(
            f"--distributed-executor-backend {executor} serves {owners[0].title}; {path} is none"
        )
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    reasons = [reason for family in families if family.why_not and (reason := family.why_not(path))]
    raise ValueError(
        "; ".join(
            [f"{path} is no checkpoint of {', '.join(_FAMILY_MODULES)}: found {found}", *reasons]
        )
    )
