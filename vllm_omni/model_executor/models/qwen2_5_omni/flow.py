# SPDX-License-Identifier: Apache-2.0
"""`FlowSolver`: solves one interval of token2wav's flow with few kernel launches.

For a short audio chunk, launching the DiT's kernels takes longer than running them, so the number
of launches determines how long a chunk takes. An interval takes four evaluations of the DiT. In
each evaluation, transformers' forward pass recomputes the speaker encoder's output for the
reference audio, both code embeddings, the rotary angles, and a [2 B, heads, T, T] mask in each
layer. `FlowSolver` computes `conditions` once per clip, broadcasts the masks, and replays an
interval of a repeated size as one CUDA graph. Operations on the latents are the same as in
transformers and run in the same order, so the result matches the output of transformers bit for
bit.

B requests, G = 2 B with guidance (conditional half first), otherwise B; T mel frames, M mel bins, D
width of the DiT's conditions, N codes.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs, Inputs

_KEPT_GRAPHS = 32
"""Maximum number of CUDA graphs. There is one graph per combination of code count and batch size.
"""

Mask = tuple[int, int]
"""Number of attention blocks that a layer attends to before the current block, and the number after
it.
"""


class FlowSolver:
    """Flow solver that uses transformers' DiT and its weights in place. If `graphs` is None,
    kernels are launched eagerly.
    """

    def __init__(self, dit: Any, graphs: ForwardGraphs | None = None) -> None:
        self._dit = dit
        self.graphs = graphs

    @classmethod
    def create(cls, dit: Any, cuda_graphs: bool) -> "FlowSolver":
        return cls(dit, ForwardGraphs(_KEPT_GRAPHS) if cuda_graphs else None)

    def clear_graphs(self) -> None:
        """Evict the graphs, because the weights have moved."""
        if self.graphs is not None:
            self.graphs.clear_graphs()

    def conditions(
        self, codes_1N: torch.Tensor, speaker_1D: torch.Tensor, ref_mel: torch.Tensor, guided: bool
    ) -> torch.Tensor:
        """Return the DiT's inputs for one request, other than the latents: the embeddings of the
        reference audio, the codes and the speaker, concatenated to [G, T, D].
        """
        embed, encoder = self._dit.text_embed, self._dit.input_embed.spk_encoder
        code_GTD = embed(codes_1N, drop_code=False)
        speaker_GTD = speaker_1D.unsqueeze(1).repeat(1, code_GTD.shape[1], 1)
        if guided:
            code_GTD = torch.cat([code_GTD, embed(codes_1N, drop_code=True)])
            speaker_GTD = torch.cat([speaker_GTD, torch.zeros_like(speaker_GTD)])
            ref_mel = torch.cat([ref_mel, torch.zeros_like(ref_mel)])
        voice_GTD = encoder(ref_mel).unsqueeze(1).repeat(1, code_GTD.shape[1], 1)
        return torch.cat((voice_GTD, code_GTD, speaker_GTD), dim=-1)

    def interval(
        self,
        mel_BTM: torch.Tensor,
        start_B11: torch.Tensor,
        end_B11: torch.Tensor,
        conditions_GTD: torch.Tensor,
        guidance_B11: torch.Tensor,
        *,
        repeats: bool,
    ) -> torch.Tensor:
        """Return the change in the mel spectrogram from flow time `start` to `end`, [B, T, M].

        Args:
            mel_BTM: Mel spectrogram at `start`.
            start_B11: Flow time at which the interval starts.
            end_B11: Flow time at which the interval ends.
            conditions_GTD: Result of `conditions`.
            guidance_B11: Guidance scale.
            repeats: Whether more intervals of this size will follow, so that capturing a CUDA
                graph pays off.
        """
        guided = conditions_GTD.shape[0] != mel_BTM.shape[0]
        inputs = {
            "mel": mel_BTM,
            "start": start_B11,
            "end": end_B11,
            "conditions": conditions_GTD,
            "guidance": guidance_B11,
            **self._positions(mel_BTM),
        }

        def run(given: Inputs) -> torch.Tensor:
            velocity = self._velocity(given, guided)
            return _three_eighths(velocity, given["start"], given["end"], given["mel"])

        if self.graphs is None:
            return run(inputs)
        key: Hashable = "interval" if repeats else None
        return self.graphs(key, inputs, run)

    def _positions(self, mel_BTM: torch.Tensor) -> Inputs:
        """Return the rotary angles [1, T, head dim], and an attention mask [1, 1, T, T] for each
        `Mask` that the layers use.
        """
        frames = torch.arange(mel_BTM.shape[1], device=mel_BTM.device)
        cos, sin = self._dit.rotary_embed(mel_BTM, frames[None, :])
        block = frames // self._dit.block_size
        ahead_TT = block[None, :] - block[:, None]
        kinds = {_mask_of(layer) for layer in self._dit.transformer_blocks}
        masks = {
            f"mask {back} {forward}": ((ahead_TT >= -back) & (ahead_TT <= forward))[None, None]
            for back, forward in sorted(kinds)
        }
        return {"cos": cos, "sin": sin, **masks}

    def _velocity(
        self, given: Inputs, guided: bool
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        dit, conditions_GTD, guidance_B11 = self._dit, given["conditions"], given["guidance"]
        angles = given["cos"], given["sin"]

        def velocity(time_B11: torch.Tensor, mel_BTM: torch.Tensor) -> torch.Tensor:
            time_G, x = time_B11.view(-1), mel_BTM
            if guided:
                time_G, x = torch.cat([time_G, time_G]), torch.cat([mel_BTM, mel_BTM])
            time_GD = dit.time_embed(time_G)
            x = dit.input_embed.proj(torch.cat((x, conditions_GTD), dim=-1))
            for layer in dit.transformer_blocks:
                back, forward = _mask_of(layer)
                x = _layer(layer, x, time_GD, angles, given[f"mask {back} {forward}"])
            output = dit.proj_out(dit.norm_out(x, time_GD))
            if not guided:
                return output
            conditional, unconditional = torch.chunk(output, 2, dim=0)
            return conditional + (conditional - unconditional) * guidance_B11

        return velocity


def _mask_of(layer: Any) -> Mask:
    return int(layer.look_backward_block), int(layer.look_ahead_block)


def _layer(
    layer: Any,
    x: torch.Tensor,
    time_GD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """Run one DiT layer from transformers with a precomputed mask."""
    attended, gate_attention, shift, scale, gate_mlp = layer.attn_norm(x, emb=time_GD)
    x = x + gate_attention.unsqueeze(1) * layer.attn(
        attended, position_embeddings=angles, attention_mask=mask
    )
    normed = layer.ff_norm(x) * (1 + scale[:, None]) + shift[:, None]
    return x + gate_mlp.unsqueeze(1) * layer.ff(normed)


def _three_eighths(
    velocity: Any, start: torch.Tensor, end: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return the change over one interval, computed with Kutta's 3/8 rule. The operations run in
    the same order as in transformers.
    """
    step, third = end - start, 1 / 3
    k1 = velocity(start, value)
    k2 = velocity(start + step * third, value + step * k1 * third)
    k3 = velocity(start + step * (2 / 3), value + step * (k2 - k1 * third))
    k4 = velocity(end, value + step * (k1 - k2 + k3))
    return (k1 + 3 * (k2 + k3) + k4) * step / 8
