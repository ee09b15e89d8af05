# SPDX-License-Identifier: Apache-2.0
"""Split an exported world into its components so that training can be resumed.

    python -m training.tiny_world.unpack DIR --out start

The script writes `vae.pt`, `tiny_decoder.pt` and the transformer as a state of the `shipped` phase.
Weights are in fp16, as in the export. `WorldTransformer.initialise` initialises the layers that the
exported transformer lacks.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from training.tiny_world.autoencoder import with_latents_scaled
from training.tiny_world.export import TINY_DECODER
from training.tiny_world.state_files import write_parts
from training.tiny_world.transformer import Sizes, WorldTransformer
from training.tiny_world.world_data import SHIPPED
from vllm_omni.model_executor.models.wan.architecture import VAEConfig


def unpack_world(world: Path, out: Path) -> None:
    """Write the components of the checkpoint directory `world` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    config = VAEConfig()
    mean, std = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    served = torch.load(world / "Wan2.1_VAE.pth", map_location="cpu", weights_only=True)
    weights = {name: value.float() for name, value in served.items()}
    torch.save(with_latents_scaled(weights, mean, std), out / "vae.pt")
    torch.save(load_file(world / TINY_DECODER), out / "tiny_decoder.pt")

    folder = world / "transformers"
    values = json.loads((folder / "config.json").read_text())
    sizes = replace(
        Sizes(),
        dim=values["dim"],
        layers=values["num_layers"],
        heads=values["num_heads"],
        ffn=values["ffn_dim"],
        window=values["sliding_window_num_frames"],
        sink=values["sink_size"],
        chunk_frames=values["num_frames_per_block"],
    )
    fresh = WorldTransformer(sizes).state_dict()
    known = {
        name: value.float() for name, value in load_file(next(folder.glob("*.safetensors"))).items()
    }
    if unknown := known.keys() - fresh.keys():
        raise ValueError(f"{folder} has tensors that the network does not: {sorted(unknown)[:3]}")
    state = {name: value.half() for name, value in (fresh | known).items()}
    listed = {name: list(v) if isinstance(v, tuple) else v for name, v in sizes.to_dict().items()}
    write_parts(
        {
            "phase": "shipped",
            "sizes": listed,
            "weights": state,
            "ema": state,
            "ema_updates": 0,
            "optimizer": None,
            "step": 0,
            "minutes": 0.0,
            "extra": None,
        },
        out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "world",
        type=Path,
        nargs="?",
        default=SHIPPED,
        help="checkpoint directory; the shipped world",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    unpack_world(args.world, args.out)


if __name__ == "__main__":
    main()
