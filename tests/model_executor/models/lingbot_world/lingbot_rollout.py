# SPDX-License-Identifier: Apache-2.0
"""Short rollouts of the tiny recorded transformer, for tests that compare different ways of running
it.
"""

from collections.abc import Sequence

import torch
from helpers.golden import golden_folder
from safetensors.torch import load_file

from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.transformer import CameraItem, LingBotTransformer

GOLDEN = golden_folder("lingbot")
GOLDEN_V2 = golden_folder("lingbot_v2")
CONFIG = LingBotWorldConfig(
    dim=32, ffn_dim=56, freq_dim=16, text_dim=24, text_len=8, num_heads=2, num_layers=2
)
TIMESTEPS = (900.0, 0.0)
CHUNKS = (range(3), range(3, 6), range(6, 9), range(9, 12))


def load_tiny(parallel: ParallelContext | None = None) -> LingBotTransformer:
    """Return this rank's shard of the recorded transformer."""
    model = LingBotTransformer(CONFIG, parallel)
    weights = load_file(GOLDEN / "dit_tiny_weights.safetensors")
    for name, slot in checkpoint_slots(model).items():
        slot.load(weights[name])
    return model


def inputs(height: int = 4) -> dict[str, torch.Tensor]:
    """Return recorded inputs, cropped to `height` latent rows. A height of 4 gives 18 tokens per
    chunk, and a height of 2 gives 9.
    """
    recorded = load_file(GOLDEN / "dit_inputs.safetensors")
    return {
        name: tensor if name == "context" else tensor[..., :height, :]
        for name, tensor in recorded.items()
    }


def make_window(
    model: LingBotTransformer,
    data: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    kind: type[KVWindow] = KVWindow,
) -> KVWindow:
    height, width = data["y"].shape[2:]
    return kind(
        num_layers=model.num_local_layers,
        window_frames=7,
        sink_frames=2,
        tokens_per_frame=height * width // 4,
        num_heads=model.num_cache_heads,
        head_dim=CONFIG.head_dim,
        dtype=dtype,
        device="cpu",
        storage=storage,
    )


def make_row(
    model: LingBotTransformer,
    data: dict[str, torch.Tensor],
    window: KVWindow,
    frames: range,
    timestep: float,
) -> CameraItem:
    part = slice(frames.start, frames.stop)
    height, width = data["y"].shape[2:]
    cos, sin = rope_tables(CONFIG.head_dim, frames, height // 2, width // 2)
    own = model.parallel.token_slice(len(cos))
    return CameraItem(
        latents=data["noise"][:, part],
        condition=data["y"][:, part],
        timestep=timestep,
        frames=frames,
        rope=(cos[own], sin[own]),
        camera=model.camera_modulation(data["camera"][0][:, part]),
        cross_kv=model.cross_attention_kv(data["context"]),
        window=window,
    )


@torch.no_grad()
def roll_out(
    stages: Sequence[LingBotTransformer],
    data: dict[str, torch.Tensor],
    windows: Sequence[KVWindow] | None = None,
    chunks: Sequence[range] = CHUNKS,
) -> list[torch.Tensor]:
    """Return the flow predicted in each chunk's noisy step. One model, or its pipeline stages in
    order, computes the flow.

    Args:
        windows: The stages' K/V windows. Default: new windows.
    """
    windows = windows or [make_window(stage, data) for stage in stages]
    flows = []
    for frames in chunks:
        for timestep in TIMESTEPS:
            hidden = None
            for stage, window in zip(stages, windows, strict=True):
                row = make_row(stage, data, window, frames, timestep)
                hidden = stage([row], hidden, kv_only=timestep == 0)
            if timestep:
                assert hidden is not None
                flows.append(hidden[0])
        for window in windows:
            window.commit(frames.stop)
    return flows
