# SPDX-License-Identifier: Apache-2.0
"""Tests of the names of Waypoint's tensors (393 released tensors, 361 and 366 in the engine's state
dicts) and of strict loading of each set.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_waypoint_config import RELEASED
from test_waypoint_parity import GOLDEN

from vllm_omni.model_executor.checkpoint.hub import check_complete
from vllm_omni.model_executor.checkpoint.loading import shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.models.waypoint.autoencoders import (
    ImageDecoder,
    ImageEncoder,
    StreamingTAEHV,
)
from vllm_omni.model_executor.models.waypoint.checkpoint import (
    LAYOUTS,
    TAEHV_FILES,
    load_autoencoder,
    load_transformer,
)
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.model_executor.models.waypoint.releases import released_config
from vllm_omni.model_executor.models.waypoint.transformer import WaypointTransformer
from vllm_omni.testing.parity.comparison import read_tensors
from vllm_omni.testing.tiny.waypoint import make_tiny

Tensors = dict[str, torch.Tensor]
BLOCKS = "transformer.blocks"
SHARED = f"{BLOCKS}.2.mlp_cond_head.cond_proj.1.weight"
Change = Callable[[Tensors], None]


def recorded(name: str) -> tuple[Tensors, WaypointConfig]:
    tensors, metadata = read_tensors(GOLDEN / f"{name}_tiny_weights.safetensors")
    return tensors, WaypointConfig.from_checkpoint(json.loads(metadata["cfg"]))


def load(tensors: Tensors, config: WaypointConfig, folder: Path) -> WaypointTransformer:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    model = WaypointTransformer(config)
    load_transformer(model, open_tensors(folder / "model.safetensors"))
    return model


def as_engine(released: Tensors, config: WaypointConfig) -> Tensors:
    """Return the released tensors of Waypoint-1.5 under the names of the engine's state dict."""
    engine: Tensors = {}
    cells = config.patch[0] * config.patch[1]
    for name, tensor in released.items():
        if name.endswith("fc1_x.weight"):
            both = (tensor, released[name.replace("fc1_x", "fc1_c")])
            engine[name.replace("fc1_x", "mlp.fc1")] = torch.cat(both, dim=1)
        elif name.endswith(("fc1_c.weight", "attn_cond_head.bias_in")):
            continue
        elif name == "unpatchify.weight":
            engine[name] = tensor.permute(1, 2, 3, 0).flatten(0, 2)
        elif name == "unpatchify.bias":
            engine[name] = tensor.repeat_interleave(cells)
        else:
            for old, new in (
                (".dit_mlp.", ".mlp."),
                ("ctrl_mlpfusion.fc2", "ctrl_mlpfusion.mlp.fc2"),
                ("attn_cond_head.", "cond_head."),
                *(
                    (f"mlp_cond_head.cond_proj.{j}.", f"cond_head.cond_proj.{j + 3}.")
                    for j in range(3)
                ),
                ("mlp_cond_head.bias_in", "cond_head.bias_in"),
            ):
                name = name.replace(old, new)
            engine[name] = tensor
    return engine


def test_both_naming_schemes_load_the_same_network(tmp_path: Path) -> None:
    released, config = recorded("wp15")
    ours, theirs = (
        load(released, config, tmp_path),
        load(as_engine(released, config), config, tmp_path),
    )
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_heads_of_another_mode_are_ignored(tmp_path: Path) -> None:
    released, config = recorded("wp15")
    released["transformer.blocks.0.cond_heads.3.bias_in"] = torch.ones(2)
    assert load(released, config, tmp_path).config == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{BLOCKS}.1.attn.v_lamb"), r"missing: 1 \(blocks\.1\.attn\.v_lamb\)"),
        (
            lambda t: t.update({f"{BLOCKS}.1.attn.gate_proj.weight": torch.ones(2, 2)}),
            r"unexpected: 1 \(blocks\.1\.attn\.gate_proj",
        ),
        (
            lambda t: t.update({"patchify.weight": torch.ones(64, 4, 2, 3)}),
            r"misshapen: 1 \(patchify\.weight",
        ),
        (lambda t: t[SHARED].view(-1)[:1].add_(1), "cond_proj.4.weight differs from block 0's"),
        (lambda t: t.pop(SHARED), r"missing: 1 \(blocks\.2\.cond_proj\.4\.weight\)"),
        (
            lambda t: t.update(
                {f"{BLOCKS}.0.mlp.fc1.weight": t[f"{BLOCKS}.0.dit_mlp.fc1.weight"].clone()}
            ),
            "twice, as",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    released, config = recorded("wp15")
    change(released)
    with pytest.raises(ValueError, match=message):
        load(released, config, tmp_path)


def test_each_bias_of_a_block_applies_to_its_half(tmp_path: Path) -> None:
    released, config = recorded("wp15")
    equal = load(released, config, tmp_path).modulation(0.5)[0]
    released["transformer.blocks.1.attn_cond_head.bias_in"] += 1
    each = load(released, config, tmp_path).modulation(0.5)[0]
    assert not torch.equal(each[1, :3], equal[1, :3]) and torch.equal(each[1, 3:], equal[1, 3:])
    assert torch.equal(each[0], equal[0])


def test_full_size_networks_have_the_published_parameters() -> None:
    """Waypoint-1.5 has the published 1,281,960,088 parameters, plus a second bias per block and
    minus the unused embedding. Waypoint-1-Small's number of parameters differs from the published
    number in the same way.
    """
    small = released_config("waypoint_1_small")
    released = WaypointConfig.from_checkpoint(RELEASED)
    for config, total, unread in (
        (released, 1_281_960_088, 2048),
        (small, 2_303_004_096, 2560 + 2048),
    ):
        with torch.device("meta"):
            model = WaypointTransformer(config)
        assert (
            sum(p.numel() for p in model.parameters())
            == total - unread + config.d_model * config.n_layers
        )


def test_autoencoders_have_the_released_sizes() -> None:
    with torch.device("meta"):
        codec, encoder, decoder = StreamingTAEHV(), ImageEncoder(), ImageDecoder()
    shapes = shapes_of(codec)
    assert len(shapes) == 128 and sum(p.numel() for p in codec.encoder.parameters()) == 1_485_344
    assert sum(p.numel() for p in codec.decoder.parameters()) == 9_886_668
    assert sum(p.numel() for p in encoder.parameters()) == 1_416_802
    assert sum(p.numel() for p in decoder.parameters()) == 69_519_494


def test_an_autoencoder_is_loaded_strictly(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "taehv_tiny_weights.safetensors")
    del tensors["decoder.22.bias"]
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"missing: 1 \(decoder\.22\.bias\)"):
        load_autoencoder(
            StreamingTAEHV(8, 8, (16, 8, 8, 8)),
            open_tensors(tmp_path / "x.safetensors"),
            what="TAEHV",
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_component_is_named_with_the_download_command(
    layout: str, tmp_path: Path
) -> None:
    """The error for a missing component names the component and the download command. A complete
    directory passes the check that `vllm-omni download` runs.
    """
    make_tiny(tmp_path, 0, layout)
    check_complete("waypoint", tmp_path)
    (
        tmp_path / TAEHV_FILES[0] if layout == "v1_5" else tmp_path / "ae" / "decoder.safetensors"
    ).unlink()
    with pytest.raises(
        ValueError,
        match=r"lacks (taehv1_5.pth or|ae/decoder.safetensors).*complete it with `vllm-omni "
        r"download waypoint",
    ):
        check_complete("waypoint", tmp_path)
