# SPDX-License-Identifier: Apache-2.0
"""Downloads of the released Waypoint models, each with its autoencoder and, for Waypoint-1, its
text encoder.

Download sizes are the published ones or are calculated from the number of parameters. The model
cards state the Apache-2.0 licence. The licences of the autoencoders' repositories were not
available.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent, HubSource

_OWNER = "Overworld"
_FILES = ("config.yaml", "model.safetensors")


def _v1_5(name: str) -> tuple[HubComponent, ...]:
    """Return the files of a Waypoint 1.5 release. TAEHV is in the repository of the transformer."""
    return (HubComponent(f"{_OWNER}/{name}", (*_FILES, "vae/*"), "", 3.8),)


def _v1(name: str) -> HubSource:
    return HubSource(
        (
            HubComponent(f"{_OWNER}/{name}", _FILES, "", 4.7),
            HubComponent(
                "OpenWorldLabs/owl_vae_f16_c16_distill_v0_nogan",
                ("*.yml", "*.safetensors"),
                "ae",
                0.3,
            ),
            HubComponent(
                "google/umt5-xl", ("*.json", "spiece.model", "*.safetensors"), "text_encoder", 7.6
            ),
        )
    )


PIECES = _v1_5("Waypoint-1.5-1B")
"""Files of Waypoint 1.5 at 1280x720."""

RELEASES = {
    "waypoint_360p": HubSource(_v1_5("Waypoint-1.5-1B-360P")),
    "waypoint_1_small": _v1("Waypoint-1-Small"),
    "waypoint_1_1_small": _v1("Waypoint-1.1-Small"),
}


def check_complete(path: Path) -> None:
    """Raise ValueError unless all components exist and the network's tensors have the right names
    and shapes. Only file names and headers are read.
    """
    from vllm_omni.model_executor.checkpoint.loading import check_shapes
    from vllm_omni.model_executor.models.waypoint.checkpoint import (
        find_layout,
        network_source,
        transformer_shapes,
    )
    from vllm_omni.model_executor.models.waypoint.config import WaypointConfig

    layout = find_layout(path)
    config = WaypointConfig.from_checkpoint(layout.config())
    layout.require(config)
    source = network_source(layout.open_network(), config)
    check_shapes(source.shapes, transformer_shapes(config, stored=True), source.where)
