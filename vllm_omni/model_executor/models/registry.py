# SPDX-License-Identifier: Apache-2.0
"""The table of model families. Code outside a model's folder looks up models here.

Each family has a `family` module that defines `FAMILY`. `vllm_omni.testing.tiny.<name>` writes tiny
checkpoints for the family. Family modules are imported on first use, so that the families can be
listed quickly.
"""

import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.checkpoint.root_config import ROOT_MODEL_TYPE
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusals, check_refusals
from vllm_omni.model_executor.presets import Preset, PresetName, ServedPreset
from vllm_omni.planning.stream_model import FamilyPlan

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_omni.actions import ActionSpace
    from vllm_omni.composition.speech import SpeechModel

_FAMILY_MODULES = {
    "null_world": "vllm_omni.testing.null.world.family",
    "null_image": "vllm_omni.testing.null.image.family",
    "lingbot_world": "vllm_omni.model_executor.models.lingbot_world.family",
    "causal_wan": "vllm_omni.model_executor.models.causal_wan.family",
    "matrix_game": "vllm_omni.model_executor.models.matrix_game.family",
    "dreamx_world": "vllm_omni.model_executor.models.dreamx_world.family",
    "abot_world": "vllm_omni.model_executor.models.abot_world.family",
    "waypoint": "vllm_omni.model_executor.models.waypoint.family",
    "wan2_2": "vllm_omni.model_executor.models.wan2_2.family",
    "lance": "vllm_omni.model_executor.models.lance.family",
    "qwen2_5_omni": "vllm_omni.model_executor.models.qwen2_5_omni.family",
    # This family comes last, because it detects every directory in the diffusers layout, including
    # directories that belong to the families above.
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
    | {"abot_world_0_5b_lf": "abot_world", "qwen2_5_omni_3b": "qwen2_5_omni"}
)
"""Family aliases. Most of them are release names (`models/<name>/hub.py`)."""

ARCHITECTURES = {
    "AbotWorldPipeline": "vllm_omni.model_executor.models.abot_world.pipeline:AbotWorldPipeline",
    "CausalWanPipeline": "vllm_omni.model_executor.models.causal_wan.pipeline:CausalWanPipeline",
    "DiffusersPipeline": "vllm_omni.model_executor.models.diffusers_pipeline.pipeline:"
    "DiffusersPipeline",
    "DreamXWorldPipeline": "vllm_omni.model_executor.models.dreamx_world.pipeline:"
    "DreamXWorldPipeline",
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
"""Model classes, keyed by architecture name. vLLM's `ModelRegistry` imports a class on first use.
"""

AR_ARCHITECTURES = {
    "Qwen2_5OmniTalkerForConditionalGeneration": (
        "vllm_omni.model_executor.models.qwen2_5_omni.talker:TalkerForConditionalGeneration"
    ),
    "VllmOmniQwen2_5OmniThinker": (
        "vllm_omni.model_executor.models.qwen2_5_omni.thinker:ThinkerForConditionalGeneration"
    ),
}
"""Autoregressive model classes, keyed by architecture name. vLLM's own defaults apply to these
models.
"""

MODEL_TYPES = (ROOT_MODEL_TYPE, "null_image", "null_world", "t2v", "ti2v")
"""Values of `model_type` in a checkpoint's `config.json` that make `vllm serve` select this
package. `t2v` and `ti2v` are the values in the original Wan checkpoints.
"""


@dataclass(frozen=True)
class ModelFamily:
    """Describes one family for the command line, the config parser and the endpoints.

    In the signatures below, `hf_config` is the dict that the function in the `hf_config` field
    returns, and `omni` contains the parsed options.
    """

    name: str
    """Name of the family and of its folder."""
    title: str
    """User-facing title: the model name, a colon and a one-line description."""
    architecture: str
    """Architecture name, a key in `ARCHITECTURES`."""
    detect: Callable[[Path], bool]
    """Function that returns whether a directory contains a checkpoint of this family, in any
    layout. The function must be cheap and must not raise.
    """
    hf_config: Callable[[Path], dict[str, Any]]
    """Function that maps a directory to keyword arguments for a `PretrainedConfig`
    (`architectures`, `dtype`, network dimensions, layout). It raises a one-line ValueError if the
    directory is not usable.
    """
    layouts: tuple[str, ...]
    """Names of the layouts that `make_tiny` can write. The first layout is the default."""
    why_not: Callable[[Path], str | None] | None = None
    """Function that returns a one-line reason why this family did not detect a directory, or None
    if the directory contains no files of this family.
    """
    default_size: Callable[[dict[str, Any]], tuple[int, int]] | None = None
    """Function that maps `hf_config` to a video's (height, width). The result is used if neither
    the user nor the world description sets a size. Default: the size in `OmniConfig`."""
    check_options: Callable[[dict[str, Any], OmniConfig], None] | None = None
    """Function of (`hf_config`, `omni`) that checks the model's options and the output size. The
    function must be fast. It raises a one-line ValueError if a check fails.
    """
    refusals: Callable[[dict[str, Any], OmniConfig, int], Refusals] = lambda *_: Refusals()
    """Function of (`hf_config`, `omni`, `--pipeline-parallel-size`) that returns the server options
    that the model does not support."""
    check_parallel: Callable[[dict[str, Any], OmniConfig, int, int], None] | None = None
    """Function of (`hf_config`, `omni`, `--tensor-parallel-size`, `--pipeline-parallel-size`) that
    raises a one-line ValueError if the network cannot be distributed over these ranks.
    """
    stream_info: Callable[[dict[str, Any], OmniConfig], dict[str, Any]] | None = None
    """Function of (`hf_config`, `omni`) that returns the `StreamInfo` fields whose values differ
    from the defaults, for example the chunk size."""
    action_space: Callable[[dict[str, Any], OmniConfig], "ActionSpace"] | None = None
    """Function of (`hf_config`, `omni`) that returns the model's controls. Default: the model has
    no controls."""
    capabilities: Callable[[dict[str, Any], OmniConfig], Capabilities] | None = None
    """Function of (`hf_config`, `omni`) that returns the capabilities, which determine the requests
    that the OpenAI endpoints accept. Default: the capabilities of a world model that starts from an
    image."""
    presets: Mapping[PresetName, Preset] = field(default_factory=dict)
    """Presets that `omni.model.preset` can select, keyed by name. Default: the family has no
    presets.
    """
    served_preset: Callable[[dict[str, Any], OmniConfig], ServedPreset] | None = None
    """Function of (`hf_config`, `omni`) that returns the preset as it applies to the checkpoint.
    Default: the family has no presets.
    """
    check_files: Callable[[Path, dict[str, Any], OmniConfig], None] | None = None
    """Function of (directory, `hf_config`, `omni`) that checks for files that only some options
    require. The function must be fast. It raises a one-line ValueError if a file is missing.
    """
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    """Supported values of `--kv-cache-dtype`."""
    takes_adapters: bool = False
    """Whether the model supports LoRA adapters (`SupportsAdapters`)."""
    plan: FamilyPlan | None = None
    """The family's networks for `vllm-omni plan`. Default: `vllm-omni plan` does not support the
    family."""
    executor_cls: str | None = None
    """Import path of the executor class that runs the model in the engine's process. Default:
    workers run the model."""
    serve_flags: Callable[[Path, bool], dict[str, str]] | None = None
    """Function of (directory, whether the server runs on a CPU) that returns the flags that
    `vllm serve --omni` adds for a family served by an autoregressive engine. Default: the flags for
    the diffusion worker.
    """
    endpoint_plugins: tuple[str, ...] = ()
    """Additional vLLM plugins that serve this family's endpoints."""
    start_speech: Callable[[Path, OmniConfig, "AsyncLLM"], Awaitable["SpeechModel"]] | None = None
    """Function of (directory, `omni`, the server's engine) that starts the model's other engines
    and returns the model, for the speech endpoints of the `vllm_omni_speech` plugin. It raises
    ValueError if the options are invalid. Default: the model does not generate speech.
    """

    def check_refusals(self, hf_config: dict[str, Any], omni: OmniConfig, stages: int) -> None:
        """Check that the model supports the server's options on `stages` pipeline stages.

        Raises:
            ValueError: The model does not support an option. The message names the option and
                states the reason.
        """
        model = self.title.partition(":")[0]
        check_refusals(model, self.refusals(hf_config, omni, stages), omni, stages)

    def size_of(self, hf_config: dict[str, Any]) -> tuple[int, int] | None:
        return None if self.default_size is None else self.default_size(hf_config)

    def make_tiny(self, out: Path, seed: int, layout: str) -> None:
        """Write a tiny checkpoint with random weights into `out`, an empty or new directory.

        Args:
            out: Directory to write the checkpoint to.
            seed: Seed of the weights.
            layout: One of `layouts`.
        """
        importlib.import_module(f"vllm_omni.testing.tiny.{self.name}").make_tiny(out, seed, layout)


def family_names() -> list[str]:
    return list(_FAMILY_MODULES)


def known_names() -> dict[str, str]:
    """Return a mapping from each family name and alias to the family name."""
    return {name: name for name in _FAMILY_MODULES} | _ALIASES


def get_family(name: str) -> ModelFamily:
    """Return a family by name or alias.

    Raises:
        ValueError: No family has this name or alias. The message lists the known names.
    """
    name = _ALIASES.get(name, name)
    if name not in _FAMILY_MODULES:
        raise ValueError(
            f"unknown model {name!r}; known: {', '.join([*_FAMILY_MODULES, *_ALIASES])}"
        )
    family = importlib.import_module(_FAMILY_MODULES[name]).FAMILY
    assert isinstance(family, ModelFamily)
    return family


def detect_family(path: Path, executor: str | None = None) -> ModelFamily:
    """Return the family of a checkpoint directory.

    If several families detect the directory, the first of them in the table is returned.

    Args:
        path: Checkpoint directory.
        executor: The user's `--distributed-executor-backend`. If it is a family's executor, only
            that family is tried.

    Raises:
        ValueError: No family recognizes the directory. The message lists the families, some of the
            directory's entries, and each family's reason if it states one.
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
