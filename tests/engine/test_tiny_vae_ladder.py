# SPDX-License-Identifier: Apache-2.0
"""Overload with the `tiny_vae` degradation in the real engine: degraded chunks and the return to
full quality.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from helpers.waits import seconds

from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import find_layout, hf_config
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, to_uint8

STREAMS, CHUNKS, AFTERWARDS = 4, 5, 2
OMNI = {
    "scheduling": "deadline",
    "degradations": ["tiny_vae"],
    "max_sessions": 16,
    "model": {"window_frames": 7, "sink_frames": 2, "video_input": False},
}


@dataclass
class Stream:
    """The frames and degradations of each chunk in a stream."""

    frames: list[torch.Tensor] = field(default_factory=list)
    degradations: list[list[str]] = field(default_factory=list)

    async def run(
        self, client: EngineClient, name: str, seed: int, chunks: int, deadline_s: float | None
    ) -> None:
        for _ in range(chunks):
            index = len(self.frames)
            meta, tensors = await client.send(
                session_id=name,
                chunk_index=index,
                prompt=f"a field in season {seed}" if index == 0 else None,
                seed=seed if index == 0 else None,
                deadline_s=deadline_s,
                chunk_period_s=deadline_s,
            )
            assert tensors["frames"].shape[0] == meta["num_frames"] == (12 if index else 9)
            self.frames.append(tensors["frames"].clone())
            self.degradations.append(meta.get("degradations", []))


def decoded_here(
    checkpoint: Path, latents: list[torch.Tensor], tiny: list[bool]
) -> list[torch.Tensor]:
    """Decode a stream's latents in this process and return its frames. `tiny` states for each chunk
    whether the tiny decoder decodes it.
    """
    layout = find_layout(checkpoint)
    wan = StreamingWanVAE(
        VAEConfig.from_dict(hf_config(checkpoint)["causal_wan"]["vae"]), encoder=False
    )
    small = TinyVAEDecoder(tiny_vae_channels(layout.tiny_vae))
    assert layout.vae is not None and layout.tiny_vae is not None
    load_vae(wan, layout.vae)
    load_tiny_vae(small, layout.tiny_vae)
    decoder, state, frames = ChunkDecoder(wan, small), None, []
    for chunk, degraded in zip(latents, tiny, strict=True):
        pixels, state = decoder.decode(chunk[None], state, tiny=degraded)
        frames.append(to_uint8(pixels))
    return frames


def test_overload_uses_the_tiny_decoder_until_it_ends(causal_wan: Path) -> None:
    """During overload, chunks are decoded by the tiny decoder; afterwards, the streams return to
    full quality.

    Several streams have deadlines that leave too little time to generate even one chunk. Degraded
    chunks report their degradations, have the right number of frames, and equal the tiny decoder's
    output for undegraded latents. A concurrent stream without a deadline is not degraded.
    """
    alone, patient = Stream(), Stream()
    watched = [Stream() for _ in range(STREAMS)]
    latents: list[list[torch.Tensor]] = []

    async def scenario() -> None:
        async with running_engine(causal_wan, omni=OMNI, dtype="float32") as client:
            took_s = []
            for _ in range(CHUNKS):
                started_s = time.perf_counter()
                await alone.run(client, "alone", 9, 1, None)
                took_s.append(time.perf_counter() - started_s)
            await asyncio.gather(
                patient.run(client, "patient", 9, CHUNKS, None),
                *(
                    stream.run(client, f"s{seed}", seed, CHUNKS, 0.9 * min(took_s))
                    for seed, stream in enumerate(watched)
                ),
            )
            for seed, stream in enumerate(watched):
                await stream.run(client, f"s{seed}", seed, AFTERWARDS, 60.0)
            for seed in range(STREAMS):
                made = []
                for index in range(CHUNKS + AFTERWARDS):
                    first = (
                        {"prompt": f"a field in season {seed}", "seed": seed} if index == 0 else {}
                    )
                    result = await client.send(
                        session_id=f"l{seed}", chunk_index=index, output="latents", **first
                    )
                    made.append(result[1]["latents"].clone())
                latents.append(made)

    asyncio.run(asyncio.wait_for(scenario(), seconds(240)))

    tiny = [[bool(names) for names in stream.degradations] for stream in watched]
    assert all(names in ([], ["tiny_vae"]) for stream in watched for names in stream.degradations)
    assert sum(map(sum, tiny)) >= STREAMS * CHUNKS // 2, tiny
    assert not any(degraded for stream in tiny for degraded in stream[-AFTERWARDS:]), tiny
    assert any(stream[CHUNKS - 1] for stream in tiny), "a stream returns from the tiny decoder"

    assert patient.degradations == [[]] * CHUNKS
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(patient.frames, alone.frames, strict=True)
    )
    for stream, made, degraded in zip(watched, latents, tiny, strict=True):
        for ours, theirs in zip(
            stream.frames, decoded_here(causal_wan, made, degraded), strict=True
        ):
            # With a different number of threads, sums are computed in a different order, which may
            # change a pixel value by 1.
            assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("omni", "engine_args"),
    [
        pytest.param({"overlap_decode": True}, {}, id="overlap"),
        pytest.param({"vae_stage": True}, {"pipeline_parallel_size": 2}, id="vae stage"),
        pytest.param({}, {"pipeline_parallel_size": 2}, id="pipeline"),
        pytest.param({"vae_parallel": True}, {"tensor_parallel_size": 2}, id="parallel decode"),
        pytest.param(
            {"chunks_in_flight": 2, "model": {"cache": "noise_matched"}}, {}, id="chunks in flight"
        ),
    ],
)
def test_decoders_alternate_in_every_configuration(
    causal_wan: Path, omni: dict[str, Any], engine_args: dict[str, Any]
) -> None:
    """The decoders alternate: two chunks that cannot meet their deadlines run between chunks that
    can.
    """
    stream, latents = Stream(), []
    options = {**OMNI, **omni, "model": {**OMNI["model"], **omni.get("model", {})}}

    async def scenario() -> None:
        async with running_engine(
            causal_wan, omni=options, dtype="float32", **engine_args
        ) as client:
            for deadline_s, count in ((60.0, 2), (0.001, 2), (60.0, 2)):
                await stream.run(client, "s", 3, count, deadline_s)
            for index in range(6):
                first = {"prompt": "a field in season 3", "seed": 3} if index == 0 else {}
                result = await client.send(
                    session_id="l", chunk_index=index, output="latents", **first
                )
                latents.append(result[1]["latents"].clone())

    asyncio.run(asyncio.wait_for(scenario(), seconds(400)))
    tiny = [bool(names) for names in stream.degradations]
    assert tiny == [False, False, True, True, False, False]
    for ours, theirs in zip(stream.frames, decoded_here(causal_wan, latents, tiny), strict=True):
        assert (ours.int() - theirs.int()).abs().max() <= 1  # sums in a different order
