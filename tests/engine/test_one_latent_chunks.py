# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with chunks of one latent frame (`num_frames_per_block: 1`)."""

import asyncio
import json
import shutil
from pathlib import Path

import torch
from helpers.engine_client import running_engine

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.media.mp4 import decode_mp4, encode_mp4
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.model_executor.models.registry import get_family

IMAGE = torch.arange(32 * 48 * 3).remainder(251).to(torch.uint8).view(32, 48, 3)


def one_latent_world(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    config = out / "lingbot_world_fast" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_frames_per_block": 1}))
    return out


async def frames_of(model: Path, chunks: int) -> list[torch.Tensor]:
    async with running_engine(model) as client:
        made = []
        for index in range(chunks):
            first = {"prompt": "a beach", "seed": 3} if index == 0 else {}
            image = {"image": IMAGE} if index == 0 else None
            _, tensors = await client.send(
                image, session_id="a", chunk_index=index, actions=[["w"]], **first
            )
            made.append(tensors["frames"].clone())
        return made


def test_chunks_of_one_latent_frame(lingbot_world: Path, tmp_path: Path) -> None:
    """With chunks of one latent frame, the first chunk has one video frame, and each later chunk
    has four.

    Endpoints report these frame counts, and a single frame is a valid video.
    """
    model = one_latent_world(lingbot_world, tmp_path / "world")
    frames = asyncio.run(frames_of(model, 4))
    assert [len(part) for part in frames] == [1, 4, 4, 4]
    assert len({part.float().mean().item() for part in frames}) == 4
    family = get_family("lingbot_world")
    assert family.stream_info is not None
    info = StreamInfo(
        **family.stream_info(family.hf_config(model), OmniConfig(height=32, width=48))
    )
    assert (info.first_chunk_frames, info.chunk_frames) == (1, 4)
    assert decode_mp4(encode_mp4(frames[0].numpy(), 16))[0].shape == (1, 32, 48, 3)
