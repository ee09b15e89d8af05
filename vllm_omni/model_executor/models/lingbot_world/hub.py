# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face repositories of the released LingBot World models.

The Fast (v1) repositories use the original layout, and the v2 repositories use their own layouts.
Download sizes come from the repositories' file lists or, for v2, are computed from the tensors. The
v2 weights are licensed under CC BY-NC-SA 4.0, which the user must accept. Public statements about
the v1 licence contradict each other; read the v1 model card. v2's bidirectional model has no public
code.
"""

import json
from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent, HubSource

_TRANSFORMER = "lingbot_world_fast"

_COMPONENTS = ("google/umt5-xxl/*", "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth")

PIECES = (
    HubComponent("robbyant/lingbot-world-base-cam", _COMPONENTS, "", 11.9),
    HubComponent("robbyant/lingbot-world-fast", ("*.safetensors", "*.json"), _TRANSFORMER, 74.2),
)

# Constructor arguments of the original network, at its released size and with the released causal
# window.
_CONFIG = {
    "_class_name": "WanModelFast",
    "model_type": "i2v",
    "control_type": "cam",
    "dim": 5120,
    "ffn_dim": 13824,
    "freq_dim": 256,
    "in_dim": 36,
    "out_dim": 16,
    "num_heads": 40,
    "num_layers": 40,
    "text_len": 512,
    "eps": 1e-6,
    "sink_size": 9,
    "num_frames_per_block": 3,
    "sliding_window_num_frames": 18,
}


def check_complete(path: Path) -> None:
    """Raise ValueError if a component is missing or if the transformer's tensors have wrong names
    or shapes.

    The check reads only file names and headers. The tensors of the other components are checked
    when they are loaded.
    """
    from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
    from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
    from vllm_omni.model_executor.models.lingbot_world.weights import transformer_shapes

    layout = find_layout(path)
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    config = LingBotWorldConfig.from_checkpoint(layout.transformer_config())
    layout.check_transformer(transformer_shapes(config))


def complete(out: Path) -> list[str]:
    """Write the transformer's `config.json` if its repository does not contain one.

    Returns:
        Paths of the written files, relative to `out`.
    """
    path = out / _TRANSFORMER / "config.json"
    if path.exists():
        return []
    path.write_text(json.dumps(_CONFIG, indent=2) + "\n")
    return [f"{_TRANSFORMER}/config.json"]


_V2 = "robbyant/lingbot-world-v2"
_V2_COMPONENTS = HubComponent(f"{_V2}-14b-causal-fast", _COMPONENTS, "", 11.9)
_DIFFUSERS = (
    "model_index.json",
    "scheduler/*",
    "text_encoder/*",
    "tokenizer/*",
    "transformer/*",
    "vae/*",
)
_CC_BY_NC_SA = (
    "CC BY-NC-SA 4.0 (no commercial use, share alike; "
    "https://creativecommons.org/licenses/by-nc-sa/4.0/legalcode)"
)


def _v2(*components: HubComponent) -> HubSource:
    """Return the source of a v2 download. No `config.json` is written for v2, because missing
    network dimensions are derived from the tensor shapes.
    """
    return HubSource(components, licence=_CC_BY_NC_SA)


RELEASES = {
    "lingbot_world_v2_1_3b": _v2(
        HubComponent(f"{_V2}-1.3b-causal-fast", ("*.safetensors", "*.json"), "", 6.8),
        _V2_COMPONENTS,
    ),
    "lingbot_world_v2_14b": _v2(
        HubComponent(f"{_V2}-14b-causal-fast", ("transformers/*",), "", 74.2), _V2_COMPONENTS
    ),
    "lingbot_world_v2_14b_diffusers": _v2(
        HubComponent(f"{_V2}-14b-causal-fast-diffusers", _DIFFUSERS, "", 86.1)
    ),
    "lingbot_world_v2_14b_pretrain": _v2(
        HubComponent(f"{_V2}-14b-causal-pretrain", ("transformer_causal/*",), "", 74.2),
        _V2_COMPONENTS,
    ),
}
"""Downloads of the causal v2 models. In the original layout, only the 14B repository includes a
text encoder, VAE and tokenizer.
"""
