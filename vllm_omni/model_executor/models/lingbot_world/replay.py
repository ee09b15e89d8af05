# SPDX-License-Identifier: Apache-2.0
"""What a session must remember so that its K/V window can be computed again under another prompt.

A frame's keys and values depend on the prompt, through the cross-attention of the layers below. After a prompt switch
the original keeps those of the old prompt. With `reprime_on_prompt_switch` the clean-context pass of every chunk still
in the window is run again, oldest first, into a second window that replaces the first when the chunk succeeds. An old
chunk then sees sinks and replayed chunks only, as it once saw what came before it.
Held by tests/model_executor/models/lingbot_world/test_lingbot_replay.py.
"""

from dataclasses import dataclass

import torch

from vllm_omni.model_executor.models.lingbot_world.condition import MASK_CHANNELS
from vllm_omni.model_executor.models.wan.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.sessions.snapshot import SavedTensors

_CAMERA_BYTES = 8 * (16 + 4)


@dataclass(frozen=True, eq=False)
class PastChunk:
    """The inputs of a committed chunk's clean-context pass. Immutable; shared by forks.

    latents: clean, fp32 [16, F, h, w]. y: [20, F, h, w], None on stages that embed no patches. relative_F44,
    intrinsics_F4: its camera, fp64, CPU.
    """

    frames: range
    latents: torch.Tensor
    y: torch.Tensor | None
    relative_F44: torch.Tensor
    intrinsics_F4: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        prefix = f"past.frame{self.frames.start}."
        named = {"latents": self.latents, "relative": self.relative_F44, "intrinsics": self.intrinsics_F4}
        if self.y is not None:
            named["y"] = self.y
        return {prefix + name: tensor for name, tensor in named.items()}

    @classmethod
    def restore(
        cls,
        saved: SavedTensors,
        frames: range,
        size: tuple[int, int],
        device: torch.device | str,
        *,
        with_condition: bool,
    ) -> "PastChunk":
        """Take a chunk of frames of `size` (height, width) out of a snapshot. Raises `RequestFailed`.

        with_condition: this rank remembers `y`.
        """
        prefix, count = f"past.frame{frames.start}.", len(frames)
        cells = [count, size[0] // VAE_SPATIAL, size[1] // VAE_SPATIAL]
        y = None
        if with_condition:
            y = saved.take(prefix + "y", device, torch.float32, [MASK_CHANNELS + LATENT_CHANNELS, *cells])
        return cls(
            frames,
            saved.take(prefix + "latents", device, torch.float32, [LATENT_CHANNELS, *cells]),
            y,
            saved.take(prefix + "relative", "cpu", torch.float64, [count, 4, 4]),
            saved.take(prefix + "intrinsics", "cpu", torch.float64, [count, 4]),
        )

    def to(self, device: torch.device | str) -> "PastChunk":
        y = None if self.y is None else self.y.to(device)
        return PastChunk(self.frames, self.latents.to(device), y, self.relative_F44, self.intrinsics_F4)


def past_nbytes(plan: ChunkPlan, frame_bytes: int) -> int:
    """Return the most bytes remembered chunks hold: `frame_bytes` of latents and condition a frame, and its camera."""
    return plan.most_remembered_frames * (frame_bytes + _CAMERA_BYTES)
