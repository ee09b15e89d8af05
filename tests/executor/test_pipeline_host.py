# SPDX-License-Identifier: Apache-2.0
"""Tests of a pipeline's weights: device, dtypes, loading and reloading."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers_direct import CPU, MakeHost

from vllm_omni.executor.pipeline_host import PipelineHost
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offload_is_refused_on_a_cpu(make_host: MakeHost, offload: str) -> None:
    """Offloading is rejected on a CPU, because the weights are already in host memory."""
    with pytest.raises(
        ValueError, match="requires an accelerator: on a CPU the weights are already in host memory"
    ):
        make_host(offload=offload)


def test_offload_and_interleaving_exclude_each_other() -> None:
    """The combination of offloading and interleaving is rejected as soon as the options are read.
    `vllm serve --omni` also rejects it.
    """
    with pytest.raises(ValueError, match=r"interleave 2 needs omni\.model\.offload 'none'"):
        DiffusersOptions.parse({"offload": "model", "interleave": 2})


def test_sleep_levels_on_a_cpu(make_host: MakeHost) -> None:
    """On a CPU, sleep level 1 frees no memory and reports zero freed bytes. Level 2 discards the
    weights, and waking up loads them again.
    """
    host = make_host()
    nbytes = host.nbytes
    weight = host.pipeline.transformer.proj_out.weight.clone()
    assert host.sleep(1) == {"freed": 0} and host.asleep
    host.wake_up()
    assert host.sleep(2) == {"freed": nbytes} and host.nbytes == 0
    with pytest.raises(RuntimeError, match="wake it up first"):
        _ = host.pipeline
    host.wake_up()
    host.wake_up()
    assert not host.asleep and torch.equal(host.pipeline.transformer.proj_out.weight, weight)


def test_dtype_of_all_and_of_single_components(
    make_host: MakeHost, tiny_pipelines: Callable[[str], Path]
) -> None:
    """`--dtype` applies to all components, and `component_dtypes` overrides it for the named
    components. Unknown names are rejected.
    """
    options = DiffusersOptions.parse({"component_dtypes": {"vae": "float32"}})
    host = PipelineHost(tiny_pipelines("wan"), options, CPU, torch.bfloat16)
    assert (host.pipeline.transformer.dtype, host.pipeline.vae.dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    with pytest.raises(ValueError, match="'vea' is none of"):
        make_host("wan", component_dtypes={"vea": "float32"})


def test_components_can_be_omitted(make_host: MakeHost) -> None:
    """Components can be omitted. For example, a deployment that receives `prompt_embeds` needs no
    text encoder.
    """
    host = make_host(without=["text_encoder", "tokenizer"])
    assert host.pipeline.text_encoder is None
    assert host.nbytes < make_host().nbytes
    with pytest.raises(ValueError, match="'text' is none of"):
        make_host(without=["text"])


def test_vae_tiling_enables_slicing(make_host: MakeHost) -> None:
    """The VAE tiling option also enables slicing. Both are off by default."""
    host = make_host(vae_tiling=True)
    assert host.pipeline.vae.use_tiling and host.pipeline.vae.use_slicing
    assert not make_host().pipeline.vae.use_tiling


def test_a_call_object_shares_only_weights(make_host: MakeHost) -> None:
    """A call object shares only the weights with the pipeline. It has its own scheduler and call
    state.
    """
    host = make_host()
    first, second = host.call_object(), host.call_object()
    assert first.transformer is second.transformer and first.scheduler is not second.scheduler
    first.scheduler.set_timesteps(3, mu=1.0)
    assert len(second.scheduler.timesteps) != 3 and len(host.pipeline.scheduler.timesteps) != 3


def test_generators_have_consecutive_seeds(make_host: MakeHost) -> None:
    """The generator for image i has the seed `seed + i`, which wraps around after the largest
    seed.
    """
    host = make_host()
    single = host.generators(7, 1)
    first, second = host.generators(6, 2)
    assert single.initial_seed() == second.initial_seed() == 7 and first.initial_seed() == 6
    assert host.generators(2**64 - 1, 2)[1].initial_seed() == 0


def test_reload_takes_the_same_class_only(
    make_host: MakeHost, tiny_pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    """A reload accepts only weights of the same pipeline class. If it gets weights of another
    class, it fails, and the pipeline keeps its weights.
    """
    host = make_host()
    with pytest.raises(ValueError, match="FluxPipeline"):
        host.reload(tiny_pipelines("flux"))
    assert type(host.pipeline).__name__ == "QwenImagePipeline"
    other = tmp_path / "other"
    shutil.copytree(tiny_pipelines("qwen_image"), other)
    host.reload(other)
    assert host.path == other and host.pipeline.transformer is not None


def test_code_in_a_checkpoint_is_not_run(
    tiny_pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    """Code in a checkpoint is never run: a component that names a module inside the checkpoint
    directory is rejected, and the module is not imported.
    """
    evil = tmp_path / "evil"
    shutil.copytree(tiny_pipelines("qwen_image"), evil)
    index = json.loads((evil / "model_index.json").read_text())
    index["scheduler"] = ["own_scheduler", "OwnScheduler"]
    (evil / "model_index.json").write_text(json.dumps(index))
    (evil / "scheduler" / "own_scheduler.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="brings its own code"):
        PipelineHost(evil, DiffusersOptions(), CPU, torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("layout", ["qwen_image", "flux", "wan", "sd3"])
def test_random_weights_need_configs_only(
    tiny_pipelines: Callable[[str], Path], tmp_path: Path, layout: str
) -> None:
    """`--load-format dummy` needs no weight files. The random weights have the same shapes, dtypes
    and values on every load.
    """
    bare = tmp_path / "bare"
    shutil.copytree(tiny_pipelines(layout), bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        PipelineHost(bare, DiffusersOptions(), CPU, torch.bfloat16)
    hosts = [
        PipelineHost(bare, DiffusersOptions(), CPU, torch.bfloat16, random_weights=True)
        for _ in range(2)
    ]
    loaded = PipelineHost(
        tiny_pipelines(layout), DiffusersOptions(), CPU, torch.bfloat16
    ).pipeline.components
    for name, component in loaded.items():
        if isinstance(component, torch.nn.Module):
            expected = {
                key: (tensor.shape, tensor.dtype) for key, tensor in component.state_dict().items()
            }
            first, second = (host.pipeline.components[name].state_dict() for host in hosts)
            assert {key: (tensor.shape, tensor.dtype) for key, tensor in first.items()} == expected
            assert all(torch.equal(first[key], second[key]) for key in first)
    frames = {"num_frames": 5} if layout == "wan" else {}
    pipeline = hosts[0].call_object()
    output = pipeline(
        prompt="x", height=32, width=48, num_inference_steps=2, output_type="pt", **frames
    )
    value = output["frames" if frames else "images"]
    assert bool(torch.isfinite(value).all())


def test_components_named_null_are_absent(
    tiny_pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    """A checkpoint without its text encoder can be loaded, although diffusers does not declare this
    component optional.
    """
    directory = tmp_path / "pipeline"
    shutil.copytree(tiny_pipelines("qwen_image"), directory)
    file = directory / "model_index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "text_encoder": [None, None], "tokenizer": [None, None]}))
    host = PipelineHost(directory, DiffusersOptions(), CPU, torch.float32)
    assert host.pipeline.text_encoder is None and host.pipeline.tokenizer is None
