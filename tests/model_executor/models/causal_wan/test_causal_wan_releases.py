# SPDX-License-Identifier: Apache-2.0
"""Published causal Wan networks are recognised by their files. Each is served with the window,
sinks and steps that it was trained with.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import load_model
from safetensors.torch import save_file

from vllm_omni.model_executor.checkpoint.hub import check_complete
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import find_layout, hf_config
from vllm_omni.model_executor.models.causal_wan.config import (
    CausalWanConfig,
    CausalWanOptions,
    resolve_plan,
)
from vllm_omni.model_executor.models.registry import detect_family
from vllm_omni.planning.models import model_of
from vllm_omni.testing.tiny.wan import write_component

Tensors = dict[str, torch.Tensor]
SHIPPED = "checkpoints/self_forcing_dmd.pt"
O_WEIGHT, NORM = "blocks.1.self_attn.o.weight", "blocks.1.norm3.weight"


@pytest.fixture(scope="module")
def components(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Return a tiny Self-Forcing directory."""
    return tiny_checkpoint("causal_wan", seed=3)


@pytest.fixture(scope="module")
def network(components: Path) -> Tensors:
    """Return the EMA network with Wan's own tensor names."""
    state = torch.load(components / SHIPPED, weights_only=True)["generator_ema"]
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def directory(components: Path, out: Path, files: dict[str, Any]) -> Path:
    """Write a directory that contains Wan's components and the given network files.

    Args:
        files: Content of each file, by relative path.
    """
    shutil.copytree(
        components, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints")
    )
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file(content, out / name)
        else:
            torch.save(content, out / name)
    return out


def wrapped(network: Tensors, prefix: str = "model.") -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in network.items()}


def served(folder: Path, **options: Any) -> tuple[int, ...]:
    """Return the sizes of a chunk, the window and the sinks in latent frames, as a server derives
    them from a directory.
    """
    values = hf_config(folder)["causal_wan"]
    config = CausalWanConfig.from_checkpoint(values["transformer"])
    plan = resolve_plan(config, CausalWanOptions.of_checkpoint(values, options))
    return plan.chunk_frames, plan.window_frames, plan.sink_frames


@pytest.mark.parametrize(
    ("position", "name", "plan", "timesteps"),
    [
        (SHIPPED, "causal_wan", (3, 21, 3), (1000, 937.5, 833.33, 625)),
        ("autoregressive_checkpoint/model.pt", "causvid", (3, 21, 3), (1000, 757, 522)),
        (
            "autoregressive_checkpoint_warp_4step_cfg2/model.pt",
            "causvid_4_steps",
            (3, 21, 3),
            (1000, 960, 888.89, 727.27),
        ),
        (
            "wan_causal_dmd_v2v/model.pt",
            "stream_diffusion_v2",
            (3, 21, 3),
            (1000, 937.5, 833.33, 625),
        ),
        (
            "krea-realtime-video-14b.safetensors",
            "krea_realtime_14b",
            (3, 6, 0),
            (1000, 937.5, 833.33, 625),
        ),
        ("rewardforcing.pt", "reward_forcing", (3, 12, 3), (1000, 937.5, 833.33, 625)),
        (
            "checkpoints/rolling_forcing_dmd.pt",
            "rolling_forcing",
            (3, 21, 3),
            (1000, 952.38, 882.35, 769.23, 555.56),
        ),
    ],
)
def test_a_release_is_recognised_by_its_file(
    position: str,
    name: str,
    plan: tuple[int, ...],
    timesteps: tuple[float, ...],
    components: Path,
    network: Tensors,
    tmp_path: Path,
) -> None:
    """Every release loads the test's network, keeps its own settings, and has a name for `vllm-omni
    download`.
    """
    content = (
        wrapped(network)
        if position.endswith(".safetensors")
        else {"generator": wrapped(network), "step": 600}
    )
    folder = directory(components, tmp_path, {position: content})
    assert detect_family(folder).name == "causal_wan"
    assert find_layout(folder).release() == name
    check_complete("causal_wan", folder)
    assert served(folder) == plan
    planned = model_of(str(folder))
    assert (planned.chunk, planned.window, planned.sinks) == plan and planned.denoise == len(
        timesteps
    )
    model = load_model(folder)
    assert model.schedule.timesteps == pytest.approx(timesteps, abs=0.01)
    assert torch.equal(model.transformer.get_parameter(O_WEIGHT), network[O_WEIGHT])
    assert served(folder, window_frames=9, sink_frames=1) == (3, 9, 1), "options take precedence"


def test_a_config_takes_precedence_over_the_release(
    components: Path, network: Tensors, tmp_path: Path
) -> None:
    """A config file in either key style takes precedence over the settings of the recognised
    release.
    """
    folder = directory(
        components, tmp_path, {"rewardforcing.pt": {"generator_ema": wrapped(network)}}
    )
    config = find_layout(folder).transformer_config()
    config.pop("local_attn_size")
    write_component(folder, {**config, "sliding_window_num_frames": 15}, "config.json")
    assert served(folder) == (3, 15, 3)


def lora_of(network: Tensors, rank: int = 4) -> tuple[Tensors, Tensors]:
    """Return a LoRA for every linear layer in the blocks, with PEFT's tensor names, and the network
    with that LoRA merged in.
    """
    generator, lora, merged = torch.Generator().manual_seed(0), {}, dict(network)
    for name, weight in network.items():
        if name.startswith("blocks.") and name.endswith(".weight") and weight.dim() == 2:
            down = torch.randn(rank, weight.shape[1], generator=generator) / 8
            up = torch.randn(weight.shape[0], rank, generator=generator) / 8
            base = f"base_model.model.{name.removesuffix('.weight')}"
            lora |= {f"{base}.lora_A.weight": down, f"{base}.lora_B.weight": up}
            merged[name] = weight + up @ down
    return lora, merged


def test_longlive_is_loaded_with_its_lora_merged(
    components: Path, network: Tensors, tmp_path: Path
) -> None:
    """LongLive's LoRA is merged into the raw network rather than into the EMA network, as in
    LongLive's own code.
    """
    lora, merged = lora_of(network)
    average = {name: torch.zeros_like(tensor) for name, tensor in network.items()}
    content = {
        "models/longlive_base.pt": {
            "generator_ema": wrapped(average),
            "generator": wrapped(network),
        },
        "models/lora.pt": {"generator_lora": lora, "critic_lora": {"x": torch.zeros(1)}},
    }
    folder = directory(components, tmp_path, content)
    check_complete("causal_wan", folder)
    assert served(folder) == (3, 12, 3)
    model = load_model(folder)
    assert torch.equal(model.transformer.get_parameter(O_WEIGHT), merged[O_WEIGHT])
    assert torch.equal(model.transformer.get_parameter(NORM), network[NORM])


def test_longlive_without_its_lora_is_refused(
    components: Path, network: Tensors, tmp_path: Path
) -> None:
    folder = directory(
        components, tmp_path, {"models/longlive_base.pt": {"generator": wrapped(network)}}
    )
    with pytest.raises(
        ValueError, match=r"without its LoRA \(models/lora\.pt or lora\.pt\).*download longlive"
    ):
        check_complete("causal_wan", folder)


@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [
        (None, ""),
        ("ema", "module.model."),
        ("generator", "model._fsdp_wrapped_module."),
        ("model", "model.diffusion_model."),
    ],
)
def test_a_custom_checkpoint_is_recognised(
    wrapper: str | None, prefix: str, components: Path, network: Tensors, tmp_path: Path
) -> None:
    """A single `.pt` file next to Wan's components is recognised, whatever its file name, top-level
    key and tensor name prefix.
    """
    state = wrapped(network, prefix)
    folder = directory(
        components, tmp_path, {"step_3000.pt": state if wrapper is None else {wrapper: state}}
    )
    assert detect_family(folder).name == "causal_wan"
    check_complete("causal_wan", folder)
    assert served(folder) == (3, 21, 3)


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ({"student": {"x": torch.zeros(1)}, "optimizer": {}}, "'student', 'optimizer'"),
        (
            {"generator": {f"unet.{i}.weight": torch.zeros(1) for i in range(9)}},
            r"'unet\.0\.weight', .* and 5 more",
        ),
    ],
    ids=["wrapper", "tensors"],
)
def test_an_unknown_state_dict_is_refused_with_its_keys(
    content: Any, seen: str, components: Path, tmp_path: Path
) -> None:
    folder = directory(components, tmp_path, {"model.pt": content})
    with pytest.raises(
        ValueError, match=rf"its keys are {seen}.*wrappers generator_ema, generator, ema"
    ) as refused:
        check_complete("causal_wan", folder)
    assert "\n" not in str(refused.value)


def test_a_training_checkpoint_alone_is_recognised_by_its_tensors(
    network: Tensors, tmp_path: Path
) -> None:
    """A directory that contains only a training checkpoint is recognised by its tensors, and
    loading it reports the missing components. Another network's file is rejected with a message
    that lists its keys.
    """
    torch.save({"generator": wrapped(network)}, tmp_path / "mine.pt")
    assert detect_family(tmp_path).name == "causal_wan"
    with pytest.raises(
        ValueError, match=r"lacks vae, text_encoder, tokenizer .*vllm-omni download causal_wan"
    ):
        check_complete("causal_wan", tmp_path)
    torch.save({"generator": {"conv.weight": torch.ones(1)}}, tmp_path / "mine.pt")
    with pytest.raises(
        ValueError,
        match=r"no checkpoint of .*: found mine\.pt; .*its keys are 'conv\.weight'.*generator_ema",
    ):
        detect_family(tmp_path)
