# SPDX-License-Identifier: Apache-2.0
"""Problems with a diffusers pipeline directory are reported in one line before any weights are
read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
    """Return a function that copies the directory and applies `change` to the copy's index."""

    def make(change: Callable[[dict[str, Any]], None] = lambda index: None) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(sd3, copy)
        index = json.loads((copy / "model_index.json").read_text())
        change(index)
        (copy / "model_index.json").write_text(json.dumps(index))
        return copy

    return make


def check(path: Path, **model: Any) -> None:
    """Check a directory as `vllm serve --omni` and the config hook do."""
    family = detect_family(path)
    assert family is FAMILY and family.check_options is not None
    check_complete(family.name, path)
    family.check_options(family.hf_config(path), OmniConfig(model=model))


def test_a_pipeline_directory_is_detected_after_all_other_families(sd3: Path) -> None:
    check(sd3)
    assert family_names()[-1] == "diffusers_pipeline"


def test_an_explicit_executor_takes_precedence_over_a_model_of_this_package(
    tmp_path: Path, null_world: Path
) -> None:
    """By default, the `wan2_2` model serves a Wan directory on a worker. If the user explicitly
    selects the diffusers executor, diffusers' own pipeline serves it.
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


def test_other_directories_are_not_detected(tmp_path: Path, null_world: Path) -> None:
    """A world model's directory, or a directory with an invalid `model_index.json`, is not detected
    as a diffusers pipeline.
    """
    assert detect_family(null_world).name == "null_world"
    for content in ("", "[]", "{}", '{"_class_name": 3}', "\xff"):
        (tmp_path / "model_index.json").write_text(content)
        assert not FAMILY.detect(tmp_path)


def test_an_unknown_pipeline_class_is_refused(broken: Callable[..., Path]) -> None:
    """A pipeline class that does not exist in diffusers is rejected. A diffusers class that is not
    a pipeline is rejected too.
    """
    for name in ("HyperPipeline", "AutoencoderKL"):
        path = broken(lambda index, name=name: index.update(_class_name=name))
        with pytest.raises(ValueError, match=f"'{name}' is no pipeline of diffusers"):
            check(path)
        shutil.rmtree(path)


def test_a_missing_component_is_refused_unless_left_out(broken: Callable[..., Path]) -> None:
    """A component that is listed in the index but missing from the directory is an error, unless
    `without` omits it.
    """
    path = broken()
    shutil.rmtree(path / "text_encoder_3")
    with pytest.raises(ValueError, match="lacks the component 'text_encoder_3'"):
        check(path)
    check(path, without=["text_encoder_3"])


def test_missing_and_pickled_weights(broken: Callable[..., Path]) -> None:
    """A component is rejected if it has no weights, if it has only pickled weights, or if a shard
    is missing.
    """
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


def test_download_refuses_the_family() -> None:
    """`vllm-omni download diffusers_pipeline` fails, because this family has no released weights to
    download.
    """
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
def test_wrong_options_are_refused(sd3: Path, model: dict[str, Any], words: str) -> None:
    """Invalid options are rejected with an error that names the wrong key or value."""
    with pytest.raises(ValueError, match=words):
        check(sd3, **model)


def test_the_default_dtype_is_that_of_the_denoiser(broken: Callable[..., Path]) -> None:
    """The default dtype is read from the header of the denoiser's weights file. `--dtype` overrides
    it.
    """
    path = broken()
    file = path / "transformer" / "diffusion_pytorch_model.safetensors"
    assert stored_dtype(path, PipelineIndex.read_folder(path)) == "float32"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    assert stored_dtype(path, PipelineIndex.read_folder(path)) == "bfloat16"
    file.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="is no safetensors file"):
        FAMILY.hf_config(path)


def test_serve_plan_chooses_the_executor(sd3: Path) -> None:
    """`vllm serve DIR --omni` selects the executor rather than a worker class, and rejects flags
    that require workers.
    """
    planned = plan([str(sd3), "--port", "0"], {}, [])
    assert planned.argv[planned.argv.index("--distributed-executor-backend") + 1] == EXECUTOR
    assert "--worker-cls" not in planned.argv
    for flags, words in (
        (["-tp", "2"], "runs on one device"),
        (["--distributed-executor-backend", "ray"], "this checkpoint requires"),
    ):
        with pytest.raises(CommandError, match=words):
            plan([str(sd3), "--port", "0", *flags], {}, [])
