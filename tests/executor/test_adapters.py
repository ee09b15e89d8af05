# SPDX-License-Identifier: Apache-2.0
"""Tests of LoRA adapters for diffusers pipelines: loading from a directory, selection per request,
and unloading at run time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_direct import direct
from helpers.scheduling import new_request, run_to_end
from safetensors.torch import load_file, save_file

from vllm_omni.executor.pipeline_runner import PipelineRunner
from vllm_omni.inputs import Lora
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions, LoraSource

Pipelines = Callable[[str], Path]
SMALL = {"height": 32, "width": 48, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def lora(
    tiny_pipelines: Pipelines, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Return a function, called as `lora(seed)`, that writes a random adapter for the tiny
    Qwen-Image and returns its directory.

    The fixture saves the adapter with diffusers.
    """
    import diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    def write(seed: int) -> Path:
        pipeline = diffusers.QwenImagePipeline.from_pretrained(tiny_pipelines("qwen_image"))
        pipeline.transformer.add_adapter(
            LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"])
        )
        generator = torch.Generator().manual_seed(seed)
        state = get_peft_model_state_dict(pipeline.transformer)
        random = {
            name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()
        }
        folder = tmp_path_factory.mktemp(f"lora-{seed}")
        diffusers.QwenImagePipeline.save_lora_weights(folder, transformer_lora_layers=random)
        return folder

    return write


def image(runner: PipelineRunner, request_id: str, **options: Any) -> torch.Tensor:
    data = new_request(
        request_id, session_id=request_id, prompt="a red fox", seed=1, options=options, **SMALL
    )
    result = run_to_end(runner, data)[request_id]
    assert isinstance(result, tuple), result
    return result[1]["images"]


def reference(path: Path, folders: dict[str, tuple[Path, float]]) -> torch.Tensor:
    """Return the image that diffusers itself generates with these adapters."""
    import diffusers

    pipeline = diffusers.QwenImagePipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    for name, (folder, _) in folders.items():
        pipeline.load_lora_weights(folder, adapter_name=name)
    pipeline.set_adapters(list(folders), [scale for _, scale in folders.values()])
    output = pipeline(
        "a red fox", generator=torch.Generator().manual_seed(1), output_type="pt", **SMALL
    )
    return (output.images * 255).round().to(torch.uint8).movedim(1, -1)


def test_adapters_per_request_equal_diffusers(
    make_runner: Callable[..., PipelineRunner],
    tiny_pipelines: Pipelines,
    lora: Callable[[int], Path],
) -> None:
    """Images generated with either adapter, with both adapters at given scales, and without
    adapters are the same as from diffusers, bit for bit.
    """
    path, first, second = tiny_pipelines("qwen_image"), lora(1), lora(2)
    runner = make_runner(
        loras={"one": {"path": str(first)}, "two": {"path": str(second), "scale": 0.5}}
    )
    bare = direct(path, 1, **SMALL)
    assert torch.equal(image(runner, "none"), bare)
    with_one = image(runner, "a", lora="one")
    assert not torch.equal(with_one, bare)
    assert torch.equal(with_one, reference(path, {"one": (first, 1.0)}))
    assert torch.equal(image(runner, "b", lora=["two"]), reference(path, {"two": (second, 0.5)}))
    both = reference(path, {"one": (first, 0.25), "two": (second, 1.5)})
    assert torch.equal(image(runner, "c", lora={"one": 0.25, "two": 1.5}), both)
    named = [Lora(name="one", scale=0.25), Lora(name="two", scale=1.5)]
    result = run_to_end(
        runner, new_request("e", session_id="e", prompt="a red fox", seed=1, lora=named, **SMALL)
    )["e"]
    assert isinstance(result, tuple) and torch.equal(result[1]["images"], both)
    assert torch.equal(image(runner, "d"), bare)


def test_interleaved_requests_keep_their_adapters(
    make_runner: Callable[..., PipelineRunner],
    tiny_pipelines: Pipelines,
    lora: Callable[[int], Path],
) -> None:
    """Each of two interleaved requests keeps its own adapters, because the runner switches adapters
    between steps.
    """
    folder = lora(1)
    runner = make_runner(interleave=2, loras={"one": {"path": str(folder)}})
    fields = {"prompt": "a red fox", "seed": 1, **SMALL}
    results = run_to_end(
        runner,
        new_request("bare", session_id="bare", **fields),
        new_request("one", session_id="one", options={"lora": "one"}, **fields),
    )
    path = tiny_pipelines("qwen_image")
    assert torch.equal(results["bare"][1]["images"], direct(path, 1, **SMALL))
    assert torch.equal(results["one"][1]["images"], reference(path, {"one": (folder, 1.0)}))


def test_load_and_unload_while_serving(
    make_runner: Callable[..., PipelineRunner],
    tiny_pipelines: Pipelines,
    lora: Callable[[int], Path],
) -> None:
    """From `add_adapter` until the adapter is removed, requests can use it. The results of requests
    without adapters do not change.
    """
    runner, folder = make_runner(), lora(1)
    adapters, pipeline = runner.host.adapters, runner.host.pipeline
    bare = image(runner, "before")
    assert adapters.add_adapter(pipeline, "late", LoraSource(path=str(folder)), number=3)
    assert not adapters.add_adapter(pipeline, "late", LoraSource(path=str(folder)))
    with pytest.raises(ValueError, match="unload it first"):
        adapters.add_adapter(pipeline, "late", LoraSource(path=str(lora(2))))
    assert torch.equal(image(runner, "bare"), bare)
    assert torch.equal(
        image(runner, "late", lora="late"),
        reference(tiny_pipelines("qwen_image"), {"x": (folder, 1.0)}),
    )
    assert (
        adapters.ids == {3}
        and adapters.remove_number(pipeline, 3)
        and not adapters.remove(pipeline, "late")
    )
    assert torch.equal(image(runner, "after"), bare)
    unknown = new_request("u", session_id="u", prompt="x", options={"lora": "late"}, **SMALL)
    failure = run_to_end(runner, unknown)["u"]
    assert failure.code == "invalid_request" and "none is loaded" in failure.message
    assert adapters.add_adapter(pipeline, "again", LoraSource(path=str(folder)))
    assert torch.equal(image(runner, "bare-2"), bare)


@pytest.mark.parametrize(
    "wanted", [3, ["one", 2], {"one": "strong"}, {"one": True}, {"one": float("nan")}]
)
def test_malformed_selections_are_refused(
    make_runner: Callable[..., PipelineRunner], wanted: Any
) -> None:
    """`options.lora` must be a name, a list of names, or an object that maps names to numbers. Any
    other value is rejected.
    """
    failure = run_to_end(
        make_runner(), new_request("a", session_id="a", prompt="x", options={"lora": wanted})
    )["a"]
    assert failure.code == "invalid_request" and "object of names and strengths" in failure.message


def test_invalid_adapter_files_are_refused(
    make_runner: Callable[..., PipelineRunner], tmp_path: Path, tiny_pipelines: Pipelines
) -> None:
    """An empty directory, a file of another type and a pickle are each rejected with an error that
    names the adapter. The pipeline continues to run.
    """
    runner = make_runner()
    adapters, pipeline = runner.host.adapters, runner.host.pipeline
    bare = image(runner, "before")
    with pytest.raises(ValueError, match=r"holds 0 \*\.safetensors"):
        adapters.add_adapter(pipeline, "empty", LoraSource(path=str(tmp_path)))
    other_package = next((tiny_pipelines("flux") / "vae").glob("*.safetensors"))
    with pytest.raises(ValueError, match="LoRA adapter 'foreign'"):
        adapters.add_adapter(pipeline, "foreign", LoraSource(path=str(other_package)))
    marker = tmp_path / "ran"
    (tmp_path / "evil.bin").write_bytes(
        b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    )
    with pytest.raises(ValueError, match="LoRA adapter 'evil'"):
        adapters.add_adapter(
            pipeline, "evil", LoraSource(path=str(tmp_path), weight_name="evil.bin")
        )
    assert not marker.exists() and adapters.names == []
    assert torch.equal(image(runner, "after"), bare)


def test_an_adapter_file_is_not_mapped(
    make_runner: Callable[..., PipelineRunner], lora: Callable[[int], Path]
) -> None:
    """An adapter file is not memory-mapped, because overwriting a mapped file would crash the
    running server.
    """
    runner, file = make_runner(), next(lora(1).glob("*.safetensors"))
    runner.host.adapters.add_adapter(runner.host.pipeline, "one", LoraSource(path=str(file)))
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_an_adapter_with_nan_is_refused_when_it_is_loaded(
    make_runner: Callable[..., PipelineRunner], lora: Callable[[int], Path], tmp_path: Path
) -> None:
    """An adapter that contains NaNs is rejected when it is loaded, because otherwise every request
    that uses it would fail.

    The pipeline continues to run without the adapter.
    """
    runner, file = make_runner(), next(lora(1).glob("*.safetensors"))
    adapters, pipeline = runner.host.adapters, runner.host.pipeline
    bare = image(runner, "before")
    save_file(
        {name: tensor * float("nan") for name, tensor in load_file(file).items()},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(ValueError, match="has NaN or Inf: the tensors of "):
        adapters.add_adapter(pipeline, "nan", LoraSource(path=str(tmp_path)))
    assert adapters.names == [] and torch.equal(image(runner, "after"), bare)


def test_a_missing_adapter_directory_is_refused_at_startup() -> None:
    """A missing adapter directory is rejected as soon as the options are read. `vllm serve --omni`
    also rejects it.
    """
    with pytest.raises(ValueError, match=r"omni\.model\.loras\.x: nowhere does not exist"):
        DiffusersOptions.parse({"loras": {"x": {"path": "nowhere"}}})
