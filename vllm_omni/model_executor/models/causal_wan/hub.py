# SPDX-License-Identifier: Apache-2.0
"""Download the published causal Wan networks. Each network is placed in a Wan 2.1 T2V directory,
where `checkpoint/releases.py` expects it.

Download sizes come from the repositories' published file lists, or are estimated from the tensors
if no list is published. Users must explicitly accept a network's licence if it restricts use or is
not stated. The model cards state the other licences.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent, HubSource

_COMPONENTS = (
    "google/umt5-xxl/*",
    "models_t5_umt5-xxl-enc-bf16.pth",
    "Wan2.1_VAE.pth",
    "config.json",
)
_WAN_1_3B = HubComponent("Wan-AI/Wan2.1-T2V-1.3B", _COMPONENTS, "", 11.9)
_WAN_14B = HubComponent("Wan-AI/Wan2.1-T2V-14B", _COMPONENTS, "", 11.9)

PIECES = (
    _WAN_1_3B,
    HubComponent("gdhe17/Self-Forcing", ("checkpoints/self_forcing_dmd.pt",), "", 5.7),
)


def check_complete(path: Path) -> None:
    """Raise ValueError if a component is missing or if the transformer's tensors have wrong names
    or shapes.

    The check reads only file names and headers. The tensors of the other components are checked
    when they are loaded.
    """
    from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import find_layout
    from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
    from vllm_omni.model_executor.models.wan.transformer.weights import (
        TRANSFORMER_RULES,
        transformer_shapes,
    )

    layout = find_layout(path)
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    config = CausalWanConfig.from_checkpoint(layout.transformer_config())
    layout.check_transformer(transformer_shapes(config), TRANSFORMER_RULES)


def _on_1_3b(
    repo: str, files: tuple[str, ...], gigabytes: float, licence: str | None = None
) -> HubSource:
    return HubSource((_WAN_1_3B, HubComponent(repo, files, "", gigabytes)), licence=licence)


_CC_BY_NC_SA = (
    "CC BY-NC-SA 4.0 (no commercial use, share alike; "
    "https://creativecommons.org/licenses/by-nc-sa/4.0/legalcode)"
)
_LONGLIVE = (
    f"{_CC_BY_NC_SA} by their model card, whose text says CC BY-NC 4.0; the code's "
    "repository announces Apache-2.0"
)
_UNSTATED = "no licence that their model card states: ask the authors before you use them"

RELEASES = {
    "causvid": _on_1_3b(
        "tianweiy/CausVid", ("autoregressive_checkpoint/model.pt",), 11.4, _CC_BY_NC_SA
    ),
    "causvid_4_steps": _on_1_3b(
        "tianweiy/CausVid",
        ("autoregressive_checkpoint_warp_4step_cfg2/model.pt",),
        11.4,
        _CC_BY_NC_SA,
    ),
    "stream_diffusion_v2": _on_1_3b(
        "jerryfeng/StreamDiffusionV2", ("wan_causal_dmd_v2v/model.pt",), 5.7
    ),
    "longlive": _on_1_3b(
        "Efficient-Large-Model/LongLive-1.3B",
        ("models/longlive_base.pt", "models/lora.pt"),
        8.5,
        _LONGLIVE,
    ),
    "krea_realtime_14b": HubSource(
        (
            _WAN_14B,
            HubComponent(
                "krea/krea-realtime-video", ("krea-realtime-video-14b.safetensors",), "", 28.6
            ),
        )
    ),
    "reward_forcing": _on_1_3b(
        "JaydenLu666/Reward-Forcing-T2V-1.3B", ("rewardforcing.pt",), 5.7, _UNSTATED
    ),
    "rolling_forcing": _on_1_3b(
        "TencentARC/RollingForcing", ("checkpoints/rolling_forcing_dmd.pt",), 16.0
    ),
}
"""All releases other than Self-Forcing. Their repositories contain only the network."""
