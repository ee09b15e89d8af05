# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a pipeline directory is said in one line, within a second, before weights
are read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.serve import plan
from vllm_omni.model_executor.checkpoint.hub import check_complete, hub_source
from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import (
    PipelineIndex,
    stored_dtype,
)
from vllm_omni.model_executor.models.registry import detect_family, family_names, get_family

FAMILY = get_family("diffusers_pipeline")
EXECUTOR = "vllm_omni.executor.DiffusersPipelineExecutor"


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "sd3"
    out.mkdir()
    FAMILY.make_tiny(out, 0, "sd3")
    return out


@pytest.fixture
def broken(sd3: Path, tmp_path: Path) -> Callable[..., Path]:
    """`broken(change)` -> a copy of the directory with its index changed by `change(index)`."""

    def make(change: Callable[[dict[str, Any]], None] = lambda index: None) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(sd3, copy)
        index = json.loads((copy / "model_index.json").read_text())
        change(index)
        (copy / "model_index.json").write_text(json.dumps(index))
        return copy

    return make


def check(path: Path, **model: Any) -> None:
    """What `vllm serve --omni` and the config hook do."""
    family = detect_family(path)
    assert family is FAMILY and family.check_options is not None
    check_complete(family.name, path)
    family.check_options(family.hf_config(path), OmniConfig(model=model))


def test_tiny_directories_are_detected_and_depend_on_the_seed(sd3: Path, tmp_path: Path) -> None:
    """Same seed, same weights; another seed, other weights; the family is the last to be asked."""
    check(sd3)
    assert family_names()[-1] == "diffusers_pipeline"
    weights = {}
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        FAMILY.make_tiny(tmp_path / str(seed), seed, "sd3")
        weights[seed] = load_file(
            tmp_path / str(seed) / "transformer" / "diffusion_pytorch_model.safetensors"
        )
    original = load_file(sd3 / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in original.items())
    assert any(not torch.equal(weights[1][name], tensor) for name, tensor in original.items())


def test_naming_the_executor_wins_over_a_model_of_this_package(
    tmp_path: Path, null_world: Path
) -> None:
    """A Wan directory goes to `wan2_2` on a worker, or, when its executor is named, to
    diffusers' own pipeline.
    """
    FAMILY.make_tiny(tmp_path, 0, "wan")
    assert detect_family(tmp_path).name == "wan2_2"
    assert detect_family(tmp_path, "mp").name == "wan2_2"
    assert detect_family(tmp_path, EXECUTOR) is FAMILY
    argv = [str(tmp_path), "--distributed-executor-backend", EXECUTOR]
    assert plan([*argv, "--port", "0"], {}, []).title == FAMILY.title
    assert plan([*argv[:1], "--port", "0"], {}, []).title.startswith("Wan 2.2")
    with pytest.raises(ValueError, match=f"{EXECUTOR} serves a diffusers pipeline"):
        detect_family(null_world, EXECUTOR)


def test_other_directories_are_not_taken(tmp_path: Path, null_world: Path) -> None:
    """Neither a world nor rubbish."""
    assert detect_family(null_world).name == "null_world"
    for content in ("", "[]", "{}", '{"_class_name": 3}', "\xff"):
        (tmp_path / "model_index.json").write_text(content)
        assert not FAMILY.detect(tmp_path)


def test_wrong_pipeline_class(broken: Callable[..., Path]) -> None:
    """A class diffusers does not have, and something of diffusers that is no pipeline."""
    for name in ("HyperPipeline", "AutoencoderKL"):
        path = broken(lambda index, name=name: index.update(_class_name=name))
        with pytest.raises(ValueError, match=f"'{name}' is no pipeline of diffusers"):
            check(path)
        shutil.rmtree(path)


def test_missing_component(broken: Callable[..., Path]) -> None:
    """A folder that the index names; leaving it out on purpose is allowed."""
    path = broken()
    shutil.rmtree(path / "text_encoder_3")
    with pytest.raises(ValueError, match="lacks the component 'text_encoder_3'"):
        check(path)
    check(path, without=["text_encoder_3"])


def test_missing_and_pickled_weights(broken: Callable[..., Path]) -> None:
    """No weights at all, pickled ones, and a shard that its listing names."""
    path = broken()
    file = path / "transformer" / "diffusion_pytorch_model.safetensors"
    (path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "part-1.safetensors", "b": file.name}})
    )
    with pytest.raises(ValueError, match=r"1 of 2 files are missing, e\.g\. part-1"):
        check(path)
    file.unlink()
    with pytest.raises(ValueError, match=r"'transformer': .* holds no \*.safetensors"):
        check(path)
    (path / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="only pickled weights"):
        check(path)


def test_there_is_nothing_to_download() -> None:
    """`vllm-omni download diffusers_pipeline` says so."""
    with pytest.raises(ValueError, match="no released weights"):
        hub_source("diffusers_pipeline")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"offlaod": "model"}, "unknown field `offlaod`"),
        ({"offload": "disk"}, "Invalid enum value 'disk'"),
        ({"pipeline_class": "NoSuchPipeline"}, "'NoSuchPipeline' is no pipeline"),
        ({"component_dtypes": {"vae": "int8"}}, "Invalid enum value 'int8'"),
        ({"loras": {"bad name": {"path": "x"}}}, "A-Za-z0-9_-"),
        ({"interleave": 0}, ">= 1"),
    ],
)
def test_wrong_options(sd3: Path, model: dict[str, Any], words: str) -> None:
    """The key or value is named."""
    with pytest.raises(ValueError, match=words):
        check(sd3, **model)


def test_stored_dtype_is_the_denoisers(broken: Callable[..., Path]) -> None:
    """Read from the file's header; vLLM serves in it unless --dtype says otherwise."""
    path = broken()
    file = path / "transformer" / "diffusion_pytorch_model.safetensors"
    assert stored_dtype(path, PipelineIndex.read_folder(path)) == "float32"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    assert stored_dtype(path, PipelineIndex.read_folder(path)) == "bfloat16"
    file.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="is no safetensors file"):
        FAMILY.hf_config(path)


def test_serve_plan_chooses_the_executor(sd3: Path) -> None:
    """`vllm serve DIR --omni`: the executor instead of a worker; flags that need workers are
    refused.
    """
    planned = plan([str(sd3), "--port", "0"], {}, [])
    assert planned.argv[planned.argv.index("--distributed-executor-backend") + 1] == EXECUTOR
    assert "--worker-cls" not in planned.argv
    for flags, words in (
        (["-tp", "2"], "runs on one device"),
        (["--distributed-executor-backend", "ray"], "this checkpoint needs"),
    ):
        with pytest.raises(CommandError, match=words):
            plan([str(sd3), "--port", "0", *flags], {}, [])
