# SPDX-License-Identifier: Apache-2.0
"""Download Qwen2.5-Omni: the 7B model, and the 3B model as a separate release. Download sizes are
estimated from the parameter counts.

The model cards state the licences. The 3B model's licence allows only research use.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent, HubSource

_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "spk_dict.pt")

PIECES = (HubComponent("Qwen/Qwen2.5-Omni-7B", _FILES, "", 22.4),)
RELEASES = {
    "qwen2_5_omni_3b": HubSource(
        (HubComponent("Qwen/Qwen2.5-Omni-3B", _FILES, "", 12.0),),
        licence="Qwen Research License, no commercial use: read the model card of "
        "Qwen/Qwen2.5-Omni-3B",
    )
}


def check_complete(path: Path) -> None:
    """Raise ValueError if the config, the voices or a weight file listed in the index is
    missing.
    """
    from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import missing_files, read_config

    read_config(path)
    missing = missing_files(path)
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} weight files, for example {missing[0]}; "
            "run `vllm-omni download qwen2_5_omni` again"
        )
