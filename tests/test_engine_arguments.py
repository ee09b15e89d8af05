# SPDX-License-Identifier: Apache-2.0
"""Every vLLM engine argument has an entry in the table, and a rejected argument raises a one-line
error.

tests/engine/test_engine_arguments_refused.py starts a real engine for each type of refusal.
"""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm
from engine_argument_samples import ALONE, BY_VLLM, FOLDED, LATER, UNSEEN
from engine_argument_samples import TOGETHER as IN_EVERY_VERSION
from helpers.scripts import load_script
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.models import supports_lora
from vllm.platforms import current_platform

from vllm_omni import registration
from vllm_omni.config import OmniConfig
from vllm_omni.engine_arguments.check import (
    check_config,
    refusal_of,
    requested_in_config,
    requested_on_command_line,
)
from vllm_omni.engine_arguments.refusals import WORKER_CLS, check_offload
from vllm_omni.engine_arguments.table import ARGUMENTS, KNOWN_FIELDS, PLAIN_FIELDS, ROWS, WorkerKind
from vllm_omni.model_executor.vllm_model import StepPipeline

REPO = Path(__file__).parents[1]
PIPELINES = (WorkerKind.DIFFUSION, WorkerKind.DIFFUSERS)


def known_to(version: str) -> set[str]:
    """Return the names of the engine arguments in a vLLM version, for example "0.33.1"."""
    minor = _minor(version)
    return {name for name, since in KNOWN_FIELDS.items() if _minor(since) <= minor}


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


TOGETHER = IN_EVERY_VERSION | {
    name: value for name, value in LATER.items() if name in known_to(vllm.__version__)
}
REFUSED = sorted(
    name
    for name, argument in ARGUMENTS.items()
    if any(argument.verdicts[who].kind == "refused" for who in PIPELINES)
)


class AtTheHook(Exception):
    """Raised in place of the config hook's checks. The exception holds the configuration that vLLM
    passes to the hook.
    """

    def __init__(self, worker: WorkerKind, vllm_config: VllmConfig) -> None:
        self.worker, self.vllm_config = worker, vllm_config


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the 2 s that vLLM waits between two checks for a Hugging Face Transformers model in a
    local directory.
    """
    monkeypatch.setattr("vllm.transformers_utils.repo_utils.time.sleep", lambda seconds: None)


@pytest.fixture
def at_the_hook(monkeypatch: pytest.MonkeyPatch, null_world: Path) -> Any:
    def stop(worker: WorkerKind, vllm_config: VllmConfig) -> None:
        raise AtTheHook(worker, vllm_config)

    def configure(**arguments: Any) -> VllmConfig:
        monkeypatch.setattr(registration, "check_config", stop)
        if arguments.get("hf_config_path"):
            arguments["hf_config_path"] = str(null_world)
        with pytest.raises(AtTheHook) as stopped:
            configure_engine(null_world, **arguments)
        return stopped.value.vllm_config

    return configure


def configure_engine(model: Path, **arguments: Any) -> VllmConfig:
    return EngineArgs(model=str(model), config_format="omni", **arguments).create_engine_config()


# ---- the table
# --------------------------------------------------------------------------------------------------


def test_the_table_has_the_fields_of_the_installed_vllm() -> None:
    """The table contains every field of the installed vLLM. A new field requires a row in the
    table, or an entry in `PLAIN_FIELDS`.
    """
    assert {field.name for field in dataclasses.fields(AsyncEngineArgs)} == known_to(
        vllm.__version__
    )


def test_no_field_has_two_rows() -> None:
    names = [argument.name for row in ROWS for argument in row.arguments()]
    names += [name for fields in PLAIN_FIELDS.values() for name in fields.split()]
    assert len(names) == len(set(names))


def test_a_refusal_says_what_to_do_and_a_row_is_needed() -> None:
    """Every refusal has a reason. A row without a refusal or a note belongs in `PLAIN_FIELDS`."""
    for argument in ARGUMENTS.values():
        assert all(
            verdict.why for verdict in argument.verdicts.values() if verdict.kind == "refused"
        ), argument.name
        assert any(verdict.why for verdict in argument.verdicts.values()), argument.name


def test_every_argument_that_is_refused_is_tried_here() -> None:
    """Every refused argument either has a sample value in these tests or is listed with the reason
    why its use cannot be detected.
    """
    tried = {
        *TOGETHER,
        *FOLDED,
        *BY_VLLM,
        *UNSEEN,
        *(name for arguments in ALONE for name in arguments),
    }
    assert set(REFUSED) - tried - (set(ARGUMENTS) - known_to(vllm.__version__)) == set()


# ---- a user's arguments, read from vLLM's config
# --------------------------------------------------------------------


def test_values_that_vllm_sets_itself_do_not_count_as_requested(at_the_hook: Any) -> None:
    """Values that vLLM sets for the platform or the model do not count as requested by the user."""
    assert requested_in_config(at_the_hook(), REFUSED) == {}


def test_defaults_passed_explicitly_do_not_count_as_requested(at_the_hook: Any) -> None:
    """vLLM's defaults do not count as requested by the user, even if all of them are passed
    explicitly.
    """
    fields = [
        field
        for field in dataclasses.fields(EngineArgs)
        if field.default is not dataclasses.MISSING
    ]
    own = {
        field.name: field.default
        for field in fields
        if field.name not in ("model", "config_format")
    }
    assert requested_in_config(at_the_hook(**own), REFUSED) == {}


def test_every_argument_is_noticed(at_the_hook: Any) -> None:
    """All arguments that vLLM accepts in combination are detected as requested by the user."""
    known = set(TOGETHER) & known_to(vllm.__version__)
    assert set(requested_in_config(at_the_hook(**TOGETHER), known)) == known


@pytest.mark.parametrize("arguments", ALONE, ids=lambda arguments: next(iter(arguments)))
def test_arguments_that_exclude_others_are_noticed(
    at_the_hook: Any, arguments: dict[str, Any]
) -> None:
    assert set(requested_in_config(at_the_hook(**arguments), list(ARGUMENTS))) >= set(arguments)


@pytest.mark.parametrize(("arguments", "named"), FOLDED.values(), ids=FOLDED)
def test_arguments_that_become_others_are_noticed(
    at_the_hook: Any, arguments: dict[str, Any], named: str
) -> None:
    assert named in requested_in_config(at_the_hook(**arguments), REFUSED)


@pytest.mark.skipif(
    not current_platform.is_cpu(), reason="other platforms have other refusals of vLLM's own"
)
@pytest.mark.parametrize("name", BY_VLLM)
def test_vllm_itself_refuses_the_rest(null_world: Path, name: str) -> None:
    with pytest.raises((ValueError, OSError)):
        configure_engine(null_world, **{name: BY_VLLM[name]})


# ---- refusals
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", PIPELINES)
def test_refused_arguments_are_named_in_one_line(at_the_hook: Any, worker: WorkerKind) -> None:
    config = at_the_hook(**TOGETHER)
    requested = requested_in_config(config, REFUSED)
    verdicts = {name: ARGUMENTS[name].verdicts[worker] for name in requested}
    refusals = [
        name
        for name, v in verdicts.items()
        if v.kind == "refused" and requested[name] not in v.unless
    ]
    with pytest.raises(ValueError, match=f"the {worker} does not support") as refused:
        check_config(worker, config)
    assert "\n" not in str(refused.value)
    for name in refusals:
        flag = ARGUMENTS[name].flag
        assert f"{flag}:" in str(refused.value) or f"{flag} " in str(refused.value), name
    assert (
        refusal_of(worker, {name: requested[name] for name in requested if name not in refusals})
        is None
    )
    assert len(refusals) > 20


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"quantization": "awq"},
            "--quantization awq: use fp8, fp8_per_channel",
        ),
        (
            {"enable_lora": True, "fully_sharded_loras": True},
            "--fully-sharded-loras: every rank holds the whole A matrices",
        ),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "--kv-cache-dtype fp8_e5m2: the K/V cache has the dtype of --dtype or",
        ),
        (
            {"offload_group_size": 2},
            "--offload-group-size 2: --cpu-offload-gb prefetches the weights",
        ),
        (
            {"attention_backend": "FLEX_ATTENTION"},
            "--attention-backend FLEX_ATTENTION: attention kernels are those of torch",
        ),
        ({"enable_prefix_caching": True}, "--enable-prefix-caching: it is always off"),
    ],
)
def test_a_start_is_refused_with_one_line(
    null_world: Path, arguments: dict[str, Any], line: str
) -> None:
    """With each of these arguments, creating vLLM's configuration fails with a one-line error
    before any process starts.
    """
    with pytest.raises(ValueError, match=f"the diffusion worker does not support {line}"):
        configure_engine(null_world, **arguments)


def test_vllm_leaves_it_to_the_family_whether_a_model_takes_adapters() -> None:
    """`StepPipeline` declares LoRA support to vLLM, so this package's own check determines whether
    a model family supports adapters.

    For a class without `SupportsLoRA`, vLLM 0.33 would reject `--enable-lora` before this check
    runs.
    """
    assert supports_lora(StepPipeline)


def test_adapters_are_refused_for_a_model_that_takes_none(null_world: Path) -> None:
    with pytest.raises(
        ValueError, match="--enable-lora: this checkpoint's model does not support adapters"
    ):
        configure_engine(null_world, enable_lora=True)


def test_adapters_do_not_go_with_layers_that_move(causal_wan: Path) -> None:
    """Adapters cannot be combined with layers that move between ranks, because the adapters' slots
    would stay on the old rank.
    """
    measured = {"omni": {"pipeline_partition": "measured"}}
    with pytest.raises(ValueError, match=r"--enable-lora: .* cannot move layers with adapters"):
        configure_engine(
            causal_wan, enable_lora=True, pipeline_parallel_size=2, additional_config=measured
        )


def test_fp8_is_refused_where_no_session_keeps_keys_and_values(null_world: Path) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8: the K/V cache of this checkpoint"):
        configure_engine(null_world, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"quantization_config": {"ignore": ["a"]}},
            "--quantization-config has no effect without --quantization",
        ),
        ({"quantization": "online"}, "--quantization online requires --quantization-config"),
    ],
    ids=["without a method", "without its configuration"],
)
def test_half_of_a_quantization_is_refused(
    null_world: Path, arguments: dict[str, Any], line: str
) -> None:
    """A quantization method without its configuration, or a configuration without a method, is
    rejected.

    Without this package's check, vLLM would ignore the configuration and raise a TypeError for the
    method.
    """
    with pytest.raises(ValueError, match=line):
        configure_engine(null_world, **arguments)


def test_values_that_are_honoured_are_not_refused(null_world: Path) -> None:
    """A value is accepted if the config hook would choose it anyway or if it is the only possible
    value.
    """
    config = configure_engine(
        null_world,
        load_format="safetensors",
        runner="pooling",
        model_impl="vllm",
        async_scheduling=False,
    )
    assert config.parallel_config.worker_cls == WORKER_CLS
    assert config.load_config.load_format == "safetensors"


def test_only_arguments_that_differ_from_their_defaults_count_as_requested() -> None:
    """The parser's namespace contains a value for every argument, but only arguments whose values
    differ from the defaults are reported.
    """
    defaults = {
        field.name: getattr(EngineArgs, field.name, None)
        for field in dataclasses.fields(EngineArgs)
    }
    plain = {name: value for name, value in defaults.items() if value is not None}
    given = {**plain, "port": 8000, "kv_cache_dtype": "fp8", "enable_lora": None}
    assert requested_on_command_line(given, {"enable_lora": None}) == {"kv_cache_dtype": "fp8"}


# ---- the page
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(REPO / "scripts" / "engine_arguments.py")


def test_the_page_is_what_the_table_says(script: ModuleType) -> None:
    """The engine arguments page is up to date. After changing the table, run
    `python scripts/engine_arguments.py`.
    """
    assert script.PAGE.read_text() == script.render()


@pytest.mark.parametrize(
    ("omni", "line"),
    [
        ({"pipeline_partition": "measured"}, "cannot move layers in host memory"),
        ({"model": {"cuda_graphs": True}}, "CUDA graphs cannot prefetch weights"),
    ],
)
def test_cpu_offload_is_refused_with_movable_layers_or_cuda_graphs(
    omni: dict[str, Any], line: str
) -> None:
    parsed = OmniConfig.from_additional_config({"omni": omni})
    check_offload(0.0, parsed)
    with pytest.raises(ValueError, match=f"--cpu-offload-gb: .*{line}"):
        check_offload(1.0, parsed)
