# SPDX-License-Identifier: Apache-2.0
"""Write the trained world as a checkpoint in LingBot World 2's own layout, with its start images.

    python -m training.tiny_world.export --vae vae.pt --tiny-decoder tiny_decoder.pt --transformer
    STATE_DIR --out DIR

All weights are fp16. The layout prescribes a latent normalisation. The difference between this and
the trained normalisation is folded into the autoencoder's outermost convolutions. The text encoder
is copied from the checkpoint that computed the embeddings for training (see `embed_prompts`).
"""

import argparse
import shutil
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

from training.tiny_world.autoencoder import with_latents_scaled
from training.tiny_world.render import Renderer
from training.tiny_world.train_world import export as export_transformer
from training.tiny_world.village import STYLES
from training.tiny_world.world_data import SHIPPED
from vllm_omni.model_executor.models.wan.architecture import VAEConfig

TINY_DECODER = "taew2_1.safetensors"
_TEXT_WEIGHTS = "models_t5_umt5-xxl-enc-bf16.pth"
# Name, x and z in metres, heading in degrees. Every landmark can be reached from these open
# positions.
VIEWS = (("square", 1.2, -4.0, 0.0), ("street", 2.6, 7.4, 195.0), ("pond", 7.4, -5.6, 290.0))


def export_world(
    vae: Path,
    tiny_decoder: Path,
    transformer: Path,
    out: Path,
    *,
    chunk_frames: int | None = None,
    text_encoder: Path = SHIPPED,
) -> None:
    """Write the checkpoint to the directory `out`.

    Args:
        text_encoder: Checkpoint that contains the text encoder to copy.
    """
    out.mkdir(parents=True, exist_ok=True)
    export_transformer(transformer, out / "transformers", chunk_frames)
    config = VAEConfig()
    mean, std = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    weights = torch.load(vae, map_location="cpu", weights_only=True)
    served = with_latents_scaled(weights, -mean / std, 1 / std)
    torch.save({name: value.half() for name, value in served.items()}, out / "Wan2.1_VAE.pth")
    cheap = torch.load(tiny_decoder, map_location="cpu", weights_only=True)
    save_file(
        {name: value.half().contiguous() for name, value in cheap.items()}, out / TINY_DECODER
    )
    shutil.copy(text_encoder / _TEXT_WEIGHTS, out)
    shutil.copytree(text_encoder / "google", out / "google", dirs_exist_ok=True)
    write_start_images(out / "start")


def write_start_images(folder: Path) -> None:
    """Render each view in each style to `VIEW_STYLE.png`, at the world's frame size."""
    folder.mkdir(parents=True, exist_ok=True)
    positions = torch.tensor([[x, z] for _, x, z, _ in VIEWS for _ in STYLES])
    yaw = torch.deg2rad(torch.tensor([heading for *_, heading in VIEWS for _ in STYLES]))
    style = torch.arange(len(STYLES)).repeat(len(VIEWS))
    frames = Renderer(frames_per_call=1).render(positions, yaw, torch.zeros_like(yaw), style)
    for index, image in enumerate(frames):
        name, position = STYLES[index % len(STYLES)], VIEWS[index // len(STYLES)][0]
        Image.fromarray(image.numpy()).save(folder / f"{position}_{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--tiny-decoder", type=Path, required=True)
    parser.add_argument("--transformer", type=Path, required=True, help="folder of state-*.bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--chunk-frames", type=int, choices=(1, 3), help="latent frames of a served chunk"
    )
    parser.add_argument(
        "--text-encoder",
        type=Path,
        default=SHIPPED,
        help="checkpoint to take the text encoder from",
    )
    args = parser.parse_args()
    export_world(
        args.vae,
        args.tiny_decoder,
        args.transformer,
        args.out,
        chunk_frames=args.chunk_frames,
        text_encoder=args.text_encoder,
    )
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
