# SPDX-License-Identifier: Apache-2.0
r"""Runs the walks that the golden-video tests compare. When run as a script, this module records
the tiny checkpoint's frames.

Record the frames again only if they are meant to change, and mention this in the commit message:

    PYTHONPATH=tests python tests/golden_video/lingbot_walk.py \
        tests/golden/lingbot_video/tiny_32x48.npz
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.engine_client import EngineClient, running_engine

from vllm_omni.model_executor.models.registry import get_family

GOLDEN = Path(__file__).parents[1] / "golden" / "lingbot_video" / "tiny_32x48.npz"
HEIGHT, WIDTH, SEED = 32, 48, 7
PROMPT = "a path through green hills"
CHUNK_KEYS = (["w"], ["w", "l"], ["s", "j"])
"""Keys held in each chunk: forward, then forward while turning, then back while turning the other
way.
"""


async def walk(
    client: EngineClient,
    session_id: str,
    first: dict[str, torch.Tensor],
    chunks: list[dict[str, Any]],
    **fields: Any,
) -> list[torch.Tensor]:
    """Send one request per entry of `chunks` and close the session.

    Args:
        first: Tensors of the first chunk.
        chunks: Fields of `DiffusionParams` for each chunk, with its tensors under `tensors`.
        fields: Fields of every chunk.

    Returns:
        Frames or latents of every chunk.
    """
    results = []
    for index, chunk in enumerate(chunks):
        own = dict(chunk)
        tensors = {**(first if index == 0 else {}), **own.pop("tensors", {})}
        _, outputs = await client.send(
            tensors, session_id=session_id, chunk_index=index, **own, **fields
        )
        [result] = outputs.values()
        results.append(result.clone())
    await client.send(session_id=session_id, op="close")
    return results


def start_image() -> torch.Tensor:
    """Return an asymmetric image. Shape: [32, 48, 3], uint8."""
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    return torch.stack((y * 7, x * 5, x + y), dim=-1).to(torch.uint8)


def tiny_frames(checkpoint: Path) -> np.ndarray:
    """Return the frames of three chunks generated in fp32 with the tiny checkpoint and seed 0.
    Shape: [33, 32, 48, 3], uint8.
    """

    async def run() -> list[torch.Tensor]:
        async with running_engine(
            checkpoint, {"height": HEIGHT, "width": WIDTH}, dtype="float32"
        ) as client:
            chunks = [{"actions": [keys] * 3} for keys in CHUNK_KEYS]
            return await walk(
                client, "golden", {"image": start_image()}, chunks, prompt=PROMPT, seed=SEED
            )

    return torch.cat(asyncio.run(run())).numpy()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Record the frames that the golden-video test compares with."
    )
    parser.add_argument("out", type=Path, help=".npz to write")
    return parser


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        get_family("lingbot_world").make_tiny(Path(folder), 0, "original")
        frames_THWC = tiny_frames(Path(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, frames=frames_THWC)
    print(f"wrote {out}: {frames_THWC.shape}, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main(make_parser().parse_args().out)
