# SPDX-License-Identifier: Apache-2.0
"""The tiny world's transformer for training: LingBot World's parameters and maths, applied to whole
clips at once.

`packed` runs a clip as one sequence, with the clean frames before the noisy ones. A mask over pairs
of frames (`masks.py`) lets each frame attend to the same frames as in serving. `clip_window.py`
runs clips chunk by chunk, as in serving. Parameters have the same names as in the original
checkpoint, so `vllm_omni` can load them. This module imports only those parts of `vllm_omni` that
require nothing but torch, because the training machine may lack the other dependencies.

For a given focal length, the camera map is linear in a frame's motion (translation and rotation).
The map's embedding is therefore computed as 12 numbers times a basis that includes the weights, so
no 384-channel maps are created.

Tested by tests/training/tiny_world/test_world_transformer.py, which compares this module with
`LingBotTransformer`.
"""

# B clips, F latent frames of a clip, G = 2 F (clean, then noisy), P tokens of a frame, S = G P, D
# width, N heads, H head dim, C = H/2 rotary lanes, E text width, X text tokens, K cached frames of
# a window

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from training.tiny_world.render import FOCAL
from training.tiny_world.village import PERIOD
from vllm_omni.model_executor.models.lingbot_world.world_pose import WORLD_FEATURES, token_rays

LATENTS, CONDITION = 16, 20
_CAMERA_CHANNELS = 6 * 64
_MOTION = 12


@dataclass(frozen=True)
class Sizes:
    """Network dimensions, and the latent grid, K/V window, chunk length and focal lengths used for
    serving.

    `grid` is the number of latent rows and columns. `focals` holds the focal lengths, in output
    pixels, for which camera maps can be embedded. `chunk_frames` is the chunk length stated in the
    exported checkpoint.
    """

    dim: int = 256
    layers: int = 6
    heads: int = 4
    ffn: int = 1024
    freq_dim: int = 64
    text_dim: int = 32
    text_len: int = 64
    grid: tuple[int, int] = (12, 20)
    window: int = 18
    sink: int = 3
    chunk_frames: int = 3
    focals: tuple[float, ...] = (104.0, 500.0)
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        """Number of tokens per latent frame."""
        return self.grid[0] * self.grid[1] // 4

    @classmethod
    def read_values(cls, values: Mapping[str, Any]) -> "Sizes":
        """Create a `Sizes` from the result of `asdict`, in which lists may have replaced tuples."""
        read: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
        }
        return cls(**read)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def config_json(self) -> dict[str, Any]:
        """Return this network's `config.json` in the original layout."""
        return {
            "_class_name": "WanModelFast",
            "model_type": "i2v",
            "control_type": "world",
            "world_period_m": PERIOD,
            "dim": self.dim,
            "num_heads": self.heads,
            "num_layers": self.layers,
            "ffn_dim": self.ffn,
            "freq_dim": self.freq_dim,
            "text_dim": self.text_dim,
            "text_len": self.text_len,
            "in_dim": LATENTS + CONDITION,
            "out_dim": LATENTS,
            "eps": self.eps,
            "sliding_window_num_frames": self.window,
            "sink_size": self.sink,
            "num_frames_per_block": self.chunk_frames,
            "dtype": "float32",
        }


# -- parts -----------------------------------------------------------------------------------------


def linear(x: torch.Tensor, *layers: nn.Linear) -> torch.Tensor:
    """Apply several layers to the same input as one matrix product, in the dtype of `x`."""
    if len(layers) == 1:
        return functional.linear(x, layers[0].weight.to(x.dtype), layers[0].bias.to(x.dtype))
    weight = torch.cat([layer.weight for layer in layers]).to(x.dtype)
    return functional.linear(x, weight, torch.cat([layer.bias for layer in layers]).to(x.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMS norm across all heads together, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of [..., T, N, H] by angles [..., T, 1, C], in fp32."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


def patchify(x: torch.Tensor) -> torch.Tensor:
    """Convert [B, F, c, h, w] to patches [B, F, P, 4 c], with values in (channel, row, column)
    order.
    """
    batch, frames, channels, height, width = x.shape
    cells = x.reshape(batch, frames, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, frames, -1, 4 * channels)


def unpatchify(tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Convert patches [B, F, P, 4 c] to [B, F, c, h, w]. The patch values are in (row, column,
    channel) order.
    """
    batch, frames, _, values = tokens.shape
    cells = tokens.view(batch, frames, grid[0] // 2, grid[1] // 2, 2, 2, values // 4)
    return cells.permute(0, 1, 6, 2, 4, 3, 5).reshape(batch, frames, values // 4, *grid)


def camera_basis(focal: float, grid: tuple[int, int]) -> torch.Tensor:
    """Return the camera map basis, fp32 [P, 12, 1536]: what each of a frame's 12 numbers
    contributes to the frame's camera map tokens.

    The 12 numbers are the translation x, y, z, followed by the rows of the rotation. The basis is
    computed in fp64.
    """
    height, width = 8 * grid[0], 8 * grid[1]
    x = (torch.arange(width, dtype=torch.float64) + 0.5 - width / 2) / focal
    y = (torch.arange(height, dtype=torch.float64) + 0.5 - height / 2) / focal
    rays = torch.stack(
        (x.expand(height, width), y.unsqueeze(1).expand(height, width), torch.ones(height, width))
    )
    rays = rays / rays.norm(dim=0)
    planes = torch.zeros(_MOTION, 6, height, width, dtype=torch.float64)
    for axis in range(3):
        planes[axis, axis] = 1.0
        for column in range(3):
            planes[3 + 3 * axis + column, 3 + axis] = rays[column]
    maps = functional.pixel_unshuffle(planes.float(), 8)
    return patchify(maps.unsqueeze(0))[0].transpose(0, 1).contiguous()


class RotaryTables(nn.Module):
    """Rotary angles by (frame, row, column). Each clip has its own frame positions, in fp64 so that
    large positions remain exact.
    """

    frequencies: torch.Tensor
    cos_hw: torch.Tensor
    sin_hw: torch.Tensor

    def __init__(self, head_dim: int, grid: tuple[int, int], theta: float = 10000.0) -> None:
        super().__init__()
        spatial = 2 * (head_dim // 6)
        temporal = head_dim - 2 * spatial
        rows, columns = grid[0] // 2, grid[1] // 2

        def rates(size: int) -> torch.Tensor:
            return theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)

        row_PC = torch.outer(torch.arange(rows).double(), rates(spatial)).repeat_interleave(
            columns, 0
        )
        column_PC = torch.outer(torch.arange(columns).double(), rates(spatial)).repeat(rows, 1)
        angles = torch.cat((row_PC, column_PC), dim=1)
        self.register_buffer("frequencies", rates(temporal), persistent=False)
        self.register_buffer("cos_hw", angles.cos().float(), persistent=False)
        self.register_buffer("sin_hw", angles.sin().float(), persistent=False)

    def forward(self, positions_BF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), fp32 [B, F P, 1, C], for frames at absolute positions."""
        batch, frames = positions_BF.shape
        angles = positions_BF.double().unsqueeze(-1) * self.frequencies
        tokens = self.cos_hw.shape[0]

        def table(temporal: torch.Tensor, spatial: torch.Tensor) -> torch.Tensor:
            first = temporal.float().unsqueeze(2).expand(batch, frames, tokens, -1)
            return torch.cat((first, spatial.expand(batch, frames, -1, -1)), dim=-1).view(
                batch, frames * tokens, 1, -1
            )

        return table(angles.cos(), self.cos_hw), table(angles.sin(), self.sin_hw)


class Attention(nn.Module):
    """An attention layer's projections and norms, with Wan's names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = _Scale(dim), _Scale(dim)


class _Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class Block(nn.Module):
    """One transformer block.

    Tokens have the shape [B, g, P, D], where each of the g frames has its own modulation.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes.dim
        self.heads, self.eps = sizes.heads, sizes.eps
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))
        self.self_attn = Attention(dim)
        self.norm3 = nn.LayerNorm(dim, eps=sizes.eps)
        self.cross_attn = Attention(dim)
        self.ffn = nn.Sequential(
            nn.Linear(dim, sizes.ffn), nn.GELU(approximate="tanh"), nn.Linear(sizes.ffn, dim)
        )
        self.cam_injector_layer1 = nn.Linear(dim, dim)
        self.cam_injector_layer2 = nn.Linear(dim, dim)
        self.cam_scale_layer = nn.Linear(dim, dim)
        self.cam_shift_layer = nn.Linear(dim, dim)

    def camera(self, camera: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the camera's (1 + scale, shift), fp32."""
        hidden = (
            linear(
                functional.silu(linear(camera, self.cam_injector_layer1)), self.cam_injector_layer2
            )
            + camera
        )
        scale, shift = linear(hidden, self.cam_scale_layer, self.cam_shift_layer).chunk(2, dim=-1)
        return 1 + scale.float(), shift.float()

    def text_keys_values(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text's normalised keys and its values, each [..., X, D]. `text` is [..., X,
        D].
        """
        attn = self.cross_attn
        k, v = linear(text, attn.k, attn.v).chunk(2, dim=-1)
        return rms_norm(k, attn.norm_k.weight, self.eps).to(text.dtype), v

    def _modulate(self, time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.modulation.float() + time).unsqueeze(3).unbind(2)

    def _queries_keys_values(
        self,
        x: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dtype: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated q and k, and v, each [B, N, g P, H]. `cos` and `sin` are [B, 1, F P, 1,
        C], and g is a multiple of F.
        """
        attn = self.self_attn
        hidden = (layer_norm(x, self.eps) * (1 + scale) + shift).to(dtype)
        q, k, v = linear(hidden, attn.q, attn.k, attn.v).chunk(3, dim=-1)
        batch, copies, tokens = x.shape[0], x.shape[1] * x.shape[2] // cos.shape[2], cos.shape[2]

        def turned(y: torch.Tensor, norm: _Scale) -> torch.Tensor:
            y = rms_norm(y, norm.weight, self.eps).view(batch, copies, tokens, self.heads, -1)
            return rotate(y, cos, sin).to(dtype).flatten(1, 2).transpose(1, 2)

        v = v.reshape(batch, copies * tokens, self.heads, -1).transpose(1, 2)
        return turned(q, attn.norm_q), turned(k, attn.norm_k), v

    def _after_attention(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        modulation: tuple[torch.Tensor, ...],
        camera: tuple[torch.Tensor, torch.Tensor],
        text_k: torch.Tensor,
        text_v: torch.Tensor,
    ) -> torch.Tensor:
        """Run the part of the block that follows self-attention. `text_k` and `text_v` are [B, g or
        1, X, D], either for each frame or for all frames.
        """
        gate1, shift2, scale2, gate2 = modulation[2:]
        dtype, cross = attended.dtype, self.cross_attn
        update = linear(attended.transpose(1, 2).flatten(2), self.self_attn.o).view(x.shape)
        x = x + gate1 * update.float()
        by_copy = x.view(x.shape[0], -1, *camera[0].shape[1:])
        x = (by_copy * camera[0].unsqueeze(1) + camera[1].unsqueeze(1)).view(x.shape)
        hidden = functional.layer_norm(
            x, x.shape[-1:], self.norm3.weight.float(), self.norm3.bias.float(), self.eps
        ).to(dtype)
        q = rms_norm(linear(hidden, cross.q), cross.norm_q.weight, self.eps).to(dtype)
        # Frames with the same text become queries of one attention call.
        q, k, v = (
            y.reshape(
                x.shape[0] * text_k.shape[1], -1, self.heads, x.shape[-1] // self.heads
            ).transpose(1, 2)
            for y in (q, text_k, text_v)
        )
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + linear(seen, cross.o)
        hidden = (layer_norm(x, self.eps) * (1 + scale2) + shift2).to(dtype)
        first, last = self.ffn[0], self.ffn[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        update = linear(functional.gelu(linear(hidden, first), approximate="tanh"), last)
        return x + gate2 * update.float()

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        camera: torch.Tensor,
        text: torch.Tensor,
        switched: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: BlockMask | torch.Tensor,
    ) -> torch.Tensor:
        """Run the block on packed clips: x fp32 [B, G, P, D], time [B, G, 6, D], camera [B, F P,
        D], text [B, 2, X, D].

        `switched`, bool [B, G], selects the frames that use the second text. Matrix products run in
        the dtype of `camera`.
        """
        modulation = self._modulate(time)
        q, k, v = self._queries_keys_values(x, modulation[0], modulation[1], cos, sin, camera.dtype)
        if isinstance(mask, BlockMask):
            attended = flex_attention(q, k, v, block_mask=mask)
        else:
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert isinstance(attended, torch.Tensor)
        which = switched[:, :, None, None]
        text_k, text_v = (
            torch.where(which, y[:, 1:], y[:, :1]) for y in self.text_keys_values(text)
        )
        scale, shift = self.camera(camera)
        return self._after_attention(x, attended, modulation, (scale, shift), text_k, text_v)

    def chunk(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        camera: tuple[torch.Tensor, torch.Tensor],
        text: tuple[torch.Tensor, torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        past_k: torch.Tensor,
        past_v: torch.Tensor,
        allowed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the block on a chunk that attends to cached keys and values, and return x and the
        chunk's own k and v.

        `past_k` and `past_v` are [B, N, K P, H], `allowed` is bool [K P + tokens in the chunk], and
        `text` holds keys and values [B, 1, X, D].
        """
        modulation = self._modulate(time)
        q, k, v = self._queries_keys_values(x, modulation[0], modulation[1], cos, sin, past_k.dtype)
        bias = (
            torch.zeros_like(allowed, dtype=q.dtype)
            .masked_fill(~allowed, -math.inf)
            .expand(*q.shape[:3], -1)
        )
        attended = functional.scaled_dot_product_attention(
            q, torch.cat((past_k, k), 2), torch.cat((past_v, v), 2), attn_mask=bias
        )
        return self._after_attention(x, attended, modulation, camera, *text), k, v


class WorldHead(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.eps = sizes.eps
        self.modulation = nn.Parameter(torch.zeros(1, 2, sizes.dim))
        self.head = nn.Linear(sizes.dim, 4 * LATENTS)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Compute fp32 patch values from x [B, g, P, D] and time [B, g, D]."""
        shift, scale = (self.modulation.float() + time.unsqueeze(2)).unsqueeze(3).unbind(2)
        return linear(layer_norm(x, self.eps) * (1 + scale) + shift, self.head)


# -- the network -----------------------------------------------------------------------------------


@dataclass
class Clips:
    """Clip inputs other than the latents, on the model's device.

    `condition`, fp32 [B, F, 20, h, w], holds the mask and the image latents. `motion`, fp32 [B, F,
    3, 4], is the rotation followed by the translation. `focal`, int64 [B], is an index into
    `Sizes.focals`. `text`, fp32 [B, 2, X, E], has zero rows after the end of each prompt, and
    `switched`, bool [B, F], selects the frames that use the second text. `positions`, [B, F], are
    absolute. `rotation`, fp32 [B, F, 3, 3], maps camera axes to world axes, and `place`, fp32 [B,
    F, 33], is the result of `frame_features`. `rotation` and `place` are zero in clips with an
    unknown world pose.
    """

    condition: torch.Tensor
    motion: torch.Tensor
    focal: torch.Tensor
    text: torch.Tensor
    switched: torch.Tensor
    positions: torch.Tensor
    rotation: torch.Tensor
    place: torch.Tensor

    def frames(self, start: int, stop: int) -> "Clips":
        """Return frames [start, stop) of all clips."""
        return self._each(lambda whole: whole, lambda by_frame: by_frame[:, start:stop])

    def picked(self, row_R: torch.Tensor, frame_RK: torch.Tensor) -> "Clips":
        """Return the clips listed in `row_R`, with the frames `frame_RK` of each."""
        return self._each(
            lambda whole: whole[row_R], lambda by_frame: by_frame[row_R.unsqueeze(1), frame_RK]
        )

    def standing(self) -> "Clips":
        """Return the same clips, but with cameras that stay at their start poses."""
        motion = torch.eye(3, 4, device=self.motion.device).expand_as(self.motion)
        rotation, position = (
            self.rotation[:, :1].expand_as(self.rotation),
            self.place[:, :1].expand_as(self.place),
        )
        return replace(self, motion=motion, rotation=rotation, place=position)

    def rows(self, which: slice) -> "Clips":
        """Return the selected clips."""
        return self._each(lambda whole: whole[which], lambda by_frame: by_frame[which])

    def _each(
        self,
        of_clip: Callable[[torch.Tensor], torch.Tensor],
        of_frames: Callable[[torch.Tensor], torch.Tensor],
    ) -> "Clips":
        """Apply one function to the per-clip fields and another to the per-frame fields."""
        names = self.__dataclass_fields__
        return Clips(
            *((of_clip if n in ("focal", "text") else of_frames)(getattr(self, n)) for n in names)
        )


class WorldTransformer(nn.Module):
    """The network. `compute_dtype` is the dtype of matrix products. The residual stream, norms,
    modulation and head stay in fp32.
    """

    basis: torch.Tensor
    rays: torch.Tensor
    frequencies: torch.Tensor

    def __init__(self, sizes: Sizes, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sizes, self.compute_dtype = sizes, compute_dtype
        dim = sizes.dim
        self.patch_embedding = nn.Conv3d(LATENTS + CONDITION, dim, (1, 2, 2), (1, 2, 2))
        self.patch_embedding_wancamctrl = nn.Linear(4 * _CAMERA_CHANNELS, dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(dim, dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(dim, dim)
        self.world_pose_layer1 = nn.Linear(WORLD_FEATURES, dim)
        self.world_pose_layer2 = nn.Linear(dim, dim)
        self.text_embedding = nn.Sequential(
            nn.Linear(sizes.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(sizes.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = WorldHead(sizes)
        self.rotary = RotaryTables(sizes.head_dim, sizes.grid)
        basis = torch.stack([camera_basis(focal, sizes.grid) for focal in sizes.focals])
        self.register_buffer("basis", basis, persistent=False)
        height, width = 8 * sizes.grid[0], 8 * sizes.grid[1]
        view = torch.tensor(
            [[FOCAL * width, FOCAL * width, width / 2, height / 2]], dtype=torch.float64
        )
        self.register_buffer("rays", token_rays(view, height, width)[0].float(), persistent=False)
        half = sizes.freq_dim // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Initialise the network close to a zero function: zero flow, no influence of the camera,
        and open gates with small updates.
        """
        depth = 2 * len(self.blocks)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Conv3d):
                fan_in = module.weight[0].numel()
                updates = name.endswith(("self_attn.o", "cross_attn.o", "ffn.2"))
                gain = 1 / math.sqrt(depth) if updates else 1.0
                nn.init.normal_(module.weight, std=gain / math.sqrt(fan_in))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        for block in self._blocks():
            nn.init.zeros_(block.cam_scale_layer.weight)
            nn.init.zeros_(block.cam_shift_layer.weight)
            with torch.no_grad():
                block.modulation[:, 2::3] = 1.0
        nn.init.normal_(self._last_linear(self.time_projection).weight, std=0.02)
        nn.init.zeros_(self.head.head.weight)
        nn.init.zeros_(self.world_pose_layer2.weight)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    @staticmethod
    def _last_linear(layers: nn.Sequential) -> nn.Linear:
        layer = layers[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def compile_blocks(self) -> None:
        """Compile one block's packed forward pass and chunk forward pass, and reuse both for all
        blocks.
        """
        for block in self._blocks():
            block.compile(dynamic=False)
            block.chunk = torch.compile(block.chunk, dynamic=False)  # type: ignore[method-assign]

    # -- embeddings --------------------------------------------------------------------------------

    def time(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (embedding [..., D], its six modulation rows [..., 6, D]) for timesteps in [0,
        1000], in fp32.
        """
        angles = timesteps.double().unsqueeze(-1) * self.frequencies
        sinusoid = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
        first, last, rows = (
            self.time_embedding[0],
            self.time_embedding[2],
            self._last_linear(self.time_projection),
        )
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        time = linear(functional.silu(linear(sinusoid, first)), last)
        return time, linear(functional.silu(time), rows).unflatten(-1, (6, -1))

    def camera(self, clips: Clips) -> torch.Tensor:
        """Return the camera tokens [B, F P, D] for the motion and world pose of all frames, in the
        dtype of the matrix products.
        """
        motion, focal = clips.motion, clips.focal
        layer = self.patch_embedding_wancamctrl
        folded = torch.einsum("npjc,dc->npjd", self.basis, layer.weight.float())
        # The embedding of a camera at rest: R = 1, t = 0.
        identity = folded[:, :, 3::4].sum(2) + layer.bias.float()
        turn = motion[..., :3] - torch.eye(3, device=motion.device)
        numbers = torch.cat((motion[..., 3], turn.flatten(2)), dim=-1)
        chosen = (focal.unsqueeze(1) == torch.arange(len(self.basis), device=focal.device)).to(
            numbers
        )
        patches = torch.einsum("bn,bfj,npjd->bfpd", chosen, numbers, folded)
        patches = patches + torch.einsum("bn,npd->bpd", chosen, identity).unsqueeze(1)
        patches = patches.flatten(1, 2).to(self.compute_dtype)
        hidden = functional.silu(linear(patches, self.c2ws_hidden_states_layer1))
        return patches + linear(hidden, self.c2ws_hidden_states_layer2) + self.world(clips)

    def world(self, clips: Clips) -> torch.Tensor:
        """Return the world pose tokens, [B, F P, D]."""
        rays = torch.einsum("bfij,pnj->bfpni", clips.rotation, self.rays).flatten(3)
        position = clips.place.unsqueeze(2).expand(-1, -1, rays.shape[2], -1)
        # This product runs in fp32, because bf16 rounds a ray's direction by up to half a pixel.
        hidden = linear(torch.cat((rays, position), dim=3).flatten(1, 2), self.world_pose_layer1)
        return linear(functional.silu(hidden).to(self.compute_dtype), self.world_pose_layer2)

    def text(self, text: torch.Tensor) -> torch.Tensor:
        """Project prompt embeddings [..., X, E] to [..., X, D], in the dtype of the matrix
        products.
        """
        first, last = self.text_embedding[0], self.text_embedding[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        hidden = functional.gelu(linear(text.to(self.compute_dtype), first), approximate="tanh")
        return linear(hidden, last)

    def patches(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the part of the patch embedding that depends on the latents, fp32 [B, F, P, D]."""
        return functional.linear(
            patchify(latents), self.patch_embedding.weight[:, :LATENTS].flatten(1)
        )

    def condition_patches(self, condition: torch.Tensor) -> torch.Tensor:
        """Return the part of the patch embedding that depends on the condition, including the bias,
        fp32 [B, F, P, D].
        """
        weight = self.patch_embedding.weight[:, LATENTS:].flatten(1)
        return functional.linear(patchify(condition), weight, self.patch_embedding.bias)

    # -- forwards ----------------------------------------------------------------------------------

    def packed(
        self,
        clean: torch.Tensor,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        clips: Clips,
        mask: BlockMask | torch.Tensor,
    ) -> torch.Tensor:
        """Predict the flow of every noisy frame, fp32 [B, F, 16, h, w].

        `clean` and `noisy` are fp32 [B, F, 16, h, w]. `timesteps`, [B, F], holds the timesteps of
        the noisy frames. Clean frames have timestep 0.
        """
        time, rows = self.time(timesteps)
        _, clean_rows = self.time(timesteps.new_zeros(1, 1))
        rows = torch.cat((clean_rows.expand_as(rows), rows), dim=1)
        condition = self.condition_patches(clips.condition)
        x = torch.cat((self.patches(clean) + condition, self.patches(noisy) + condition), dim=1)
        camera = self.camera(clips)
        text = self.text(clips.text)
        switched = torch.cat((clips.switched, clips.switched), dim=1)
        cos, sin = (table.unsqueeze(1) for table in self.rotary(clips.positions))
        for block in self.blocks:
            x = block(x, rows, camera, text, switched, cos, sin, mask)
        return unpatchify(self.head(x[:, clean.shape[1] :], time), self.sizes.grid)

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write `config.json` and one fp16 safetensors file. If `weights` is given, its values,
        for example averages, replace the parameter values.
        """
        from safetensors.torch import save_file

        state = dict(self.state_dict() if weights is None else weights)
        halves = {
            name: value.detach().to("cpu", torch.float16).contiguous()
            for name, value in state.items()
        }
        broken = [name for name, value in halves.items() if not bool(torch.isfinite(value).all())]
        if broken:
            raise ValueError(
                f"{len(broken)} tensors hold values that fp16 has not, e.g. {broken[:3]}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        save_file(halves, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(
            json.dumps(self.sizes.config_json(), indent=2, sort_keys=True) + "\n"
        )
