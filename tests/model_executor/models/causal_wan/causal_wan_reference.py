# SPDX-License-Identifier: Apache-2.0
"""Causal Wan written out plainly (one chunk, a list of past keys, no cache classes), to record
golden directories of other sizes than the recorded ones. Shares no code with the implementation;
fp64 throughout.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, linear, silu

Past = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V [tokens of a frame, heads, head dim] of each frame, oldest first."""


class Reference:
    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.c = config
        generator = torch.Generator().manual_seed(seed)
        dim, ffn = config["dim"], config["ffn_dim"]

        def rand(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).float()

        def dense(name: str, out: int, inside: int) -> dict[str, torch.Tensor]:
            return {
                f"{name}.weight": rand(out, inside, scale=inside**-0.5),
                f"{name}.bias": rand(out, scale=0.1),
            }

        w: dict[str, torch.Tensor] = {
            "patch_embedding.weight": rand(dim, 16, 1, 2, 2, scale=0.125),
            "patch_embedding.bias": rand(dim, scale=0.1),
            "head.modulation": rand(1, 2, dim, scale=0.1),
            **dense("text_embedding.0", dim, config["text_dim"]),
            **dense("text_embedding.2", dim, dim),
            **dense("time_embedding.0", dim, config["freq_dim"]),
            **dense("time_embedding.2", dim, dim),
            **dense("time_projection.1", 6 * dim, dim),
            **dense("head.head", 64, dim),
        }
        for i in range(config["num_layers"]):
            b = f"blocks.{i}"
            w[f"{b}.modulation"] = rand(1, 6, dim, scale=0.1)
            w |= {
                f"{b}.norm3.weight": 1 + rand(dim, scale=0.1),
                f"{b}.norm3.bias": rand(dim, scale=0.1),
            }
            for a in ("self_attn", "cross_attn"):
                for p in "qkvo":
                    w |= dense(f"{b}.{a}.{p}", dim, dim)
                w |= {f"{b}.{a}.norm_{p}.weight": 1 + rand(dim, scale=0.1) for p in "qk"}
            w |= {**dense(f"{b}.ffn.0", ffn, dim), **dense(f"{b}.ffn.2", dim, ffn)}
        self.stored = w
        self.w = {name: tensor.double() for name, tensor in w.items()}

    def _dense(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def _rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["eps"])
            * self.w[f"{name}.weight"]
        )

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.c["num_heads"], -1))

    def _rotate(self, x_TNH: torch.Tensor, first: int, grid: tuple[int, int, int]) -> torch.Tensor:
        lanes = x_TNH.shape[-1] // 2
        spatial = lanes // 3
        turns = []
        for f in range(first, first + grid[0]):
            for row in range(grid[1]):
                for column in range(grid[2]):
                    angles = [
                        position * 10000 ** (-2 * j / (2 * count))
                        for position, count in (
                            (f, lanes - 2 * spatial),
                            (row, spatial),
                            (column, spatial),
                        )
                        for j in range(count)
                    ]
                    turns.append(angles)
        turn = torch.polar(
            torch.ones(1, dtype=torch.float64), torch.tensor(turns, dtype=torch.float64)
        )
        pairs = torch.view_as_complex(x_TNH.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn.unsqueeze(1)).flatten(-2)

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("tnh,snh->nts", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("nts,snh->tnh", scores.softmax(-1), v).flatten(1)

    def flow(
        self, x: torch.Tensor, t: float, text: torch.Tensor, first: int, past: list[Past]
    ) -> tuple[Any, Any]:
        """x [16, F, h, w] -> (flow, K and V per layer and frame of the chunk); past: what each
        layer sees before it.
        """
        frames, grid = x.shape[1], (x.shape[1], x.shape[2] // 2, x.shape[3] // 2)
        half = self.c["freq_dim"] // 2
        angle = t * 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
        e = self._dense(
            "time_embedding.2",
            silu(self._dense("time_embedding.0", torch.cat((angle.cos(), angle.sin())))),
        )
        six = self._dense("time_projection.1", silu(e)).view(6, -1)
        padded = torch.zeros(self.c["text_len"], text.shape[1], dtype=torch.float64)
        padded[: len(text)] = text
        context = self._dense(
            "text_embedding.2", gelu(self._dense("text_embedding.0", padded), approximate="tanh")
        )
        patches = (
            x.double()
            .unflatten(2, (-1, 2))
            .unflatten(4, (-1, 2))
            .permute(1, 2, 4, 0, 3, 5)
            .flatten(3)
            .flatten(0, 2)
        )
        h = linear(
            patches, self.w["patch_embedding.weight"].flatten(1), self.w["patch_embedding.bias"]
        )
        made = []
        for i in range(self.c["num_layers"]):
            b = f"blocks.{i}"
            s1, c1, g1, s2, c2, g2 = self.w[f"{b}.modulation"][0] + six
            y = layer_norm(h, h.shape[-1:], eps=self.c["eps"]) * (1 + c1) + s1
            q, k = (
                self._heads(
                    self._rms(f"{b}.self_attn.norm_{p}", self._dense(f"{b}.self_attn.{p}", y))
                )
                for p in "qk"
            )
            q, k = self._rotate(q, first, grid), self._rotate(k, first, grid)
            v = self._heads(self._dense(f"{b}.self_attn.v", y))
            made.append(list(zip(k.chunk(frames), v.chunk(frames), strict=True)))
            seen = [*past[i], *made[-1]]
            attended = self._attend(
                q, torch.cat([key for key, _ in seen]), torch.cat([value for _, value in seen])
            )
            h = h + g1 * self._dense(f"{b}.self_attn.o", attended)
            y = layer_norm(
                h,
                h.shape[-1:],
                self.w[f"{b}.norm3.weight"],
                self.w[f"{b}.norm3.bias"],
                self.c["eps"],
            )
            q = self._heads(
                self._rms(f"{b}.cross_attn.norm_q", self._dense(f"{b}.cross_attn.q", y))
            )
            k = self._heads(
                self._rms(f"{b}.cross_attn.norm_k", self._dense(f"{b}.cross_attn.k", context))
            )
            v = self._heads(self._dense(f"{b}.cross_attn.v", context))
            h = h + self._dense(f"{b}.cross_attn.o", self._attend(q, k, v))
            y = layer_norm(h, h.shape[-1:], eps=self.c["eps"]) * (1 + c2) + s2
            h = h + g2 * self._dense(
                f"{b}.ffn.2", gelu(self._dense(f"{b}.ffn.0", y), approximate="tanh")
            )
        shift, scale = self.w["head.modulation"][0] + e
        out = self._dense(
            "head.head", layer_norm(h, h.shape[-1:], eps=self.c["eps"]) * (1 + scale) + shift
        )
        cells = out.view(*grid, 2, 2, 16).permute(5, 0, 1, 3, 2, 4)
        return cells.reshape(16, frames, x.shape[2], x.shape[3]), made


def table(shift: float) -> list[float]:
    return [shift * u / (1 + (shift - 1) * u) for u in (1 - i / 1000 for i in range(1000))]


def sigma_of(shift: float, t: float) -> float:
    return min(table(shift), key=lambda sigma: abs(1000 * sigma - t))


def evict(past: Past, window: int, sink: int, incoming: int) -> Past:
    """Drop the oldest frames behind the sinks until `incoming` more fit."""
    over = max(0, len(past) + incoming - window)
    return past[:sink] + past[sink + over :]


def record_self_forcing(
    out: Path, case: dict[str, Any], config: dict[str, Any], seed: int = 3
) -> None:
    """Write one `sf_*` case, its metadata and weights. case: the recorded keys, `steps` = table
    entries.
    """
    reference = Reference(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    h, w = config["latent_hw"]
    size, chunks, shift = case["num_frame_per_block"], case["chunks"], case["shift"]
    window, sink, tokens = case["local_attn_size"], case["sink_size"], h * w // 4
    timesteps = [1000 * table(shift)[index] for index in case["steps"]]
    text = torch.randn(config["text_len"], config["text_dim"], generator=generator)
    noise = torch.randn(16, size * chunks, h, w, generator=generator)
    tensors = {"noise": noise.transpose(0, 1)[None].contiguous(), "prompt_embeds": text[None]}
    past: list[Past] = [[] for _ in range(config["num_layers"])]
    calls: list[dict[str, Any]] = []
    clips, draws = [], 0
    for chunk in range(chunks):
        x = noise[:, chunk * size : (chunk + 1) * size].double()
        first = chunk * size
        before = [evict(layer, window, sink, size) for layer in past]
        for step, t in enumerate([*timesteps, 0.0]):
            flow, made = reference.flow(x, t, text.double(), first, before)
            name = f"call{len(calls):02d}"
            tensors |= {f"{name}.in": _stored(x), f"{name}.flow": _stored(flow)}
            valid = min((first + size), window) * tokens
            calls.append(
                {
                    "t": [t] * size,
                    "start": first * tokens,
                    "frames": size,
                    "g_end": (first + size) * tokens,
                }
            )
            calls[-1]["l_end"] = valid
            if step < len(timesteps):
                x0 = x - sigma_of(shift, t) * flow
                x = x0
            if step + 1 < len(timesteps):
                draw = torch.randn(size, 16, h, w, generator=generator)
                tensors[f"renoise{draws:02d}"] = draw
                draws += 1
                sigma = sigma_of(shift, timesteps[step + 1])
                x = (1 - sigma) * x0 + sigma * draw.transpose(0, 1).double()
        past = [[*layer, *new] for layer, new in zip(before, made, strict=True)]
        clips.append(x0)
    for layer in range(config["num_layers"]):
        for index, kind in enumerate("kv"):
            frames = torch.cat([pair[index] for pair in past[layer]])
            buffer = torch.zeros(window * tokens, *frames.shape[1:])
            buffer[: len(frames)] = frames
            tensors[f"call{len(calls) - 1:02d}.cache{layer}.{kind}"] = buffer[None].contiguous()
    tensors["latents"] = _stored(torch.cat(clips, dim=1))
    meta = {**case, "calls": calls, "warped_timesteps": timesteps, "cache_tokens": window * tokens}
    meta["tokens_per_frame"] = tokens
    save_file(tensors, out / f"{case['case']}.safetensors")
    (out / "sf_meta.json").write_text(json.dumps({"config": config, "cases": {case["case"]: meta}}))
    save_file(reference.stored, out / "tiny_causal_wan_state.safetensors")


def record_stream_batch(
    out: Path, case: dict[str, Any], config: dict[str, Any], seed: int = 3
) -> None:
    """Write one `sdv2_stream_*` case beside the weights of `record_self_forcing` with the same
    config and seed.
    """
    reference = Reference(config, seed)
    generator = torch.Generator().manual_seed(seed + 2)
    h, w = config["latent_hw"]
    steps, chunks, window, sink, shift = (
        case["steps"],
        case["chunks"],
        case["kv_frames"],
        case["sink"],
        case["shift"],
    )
    text = torch.randn(config["text_len"], config["text_dim"], generator=generator)
    inputs, tensors = {"prompt_embeds": text[None]}, {}
    scales = [0.8 - 0.01 * (chunk % 7) for chunk in range(chunks + 1)]
    firsts = [math.floor(1000 * scale) - 100 for scale in scales]
    past: list[list[Past]] = [[[] for _ in range(config["num_layers"])] for _ in steps]
    start = 0
    for chunk in range(chunks + 1):
        size = case["first"] if chunk == 0 else case["size"]
        x = torch.randn(size, 16, h, w, generator=generator)
        inputs[f"noisy{chunk:02d}"] = x[None]
        x = x.transpose(0, 1).double()
        timesteps = [firsts[chunk], *steps[1:]]
        for step, t in enumerate(timesteps):
            before = [evict(layer, window, sink, size) for layer in past[step]]
            flow, made = reference.flow(x, t, text.double(), start, before)
            x0 = x - sigma_of(shift, t) * flow
            past[step] = [[*layer, *new] for layer, new in zip(before, made, strict=True)]
            if step + 1 < len(steps):
                draw = torch.randn(size, 16, h, w, generator=generator)
                inputs[f"renoise{chunk:02d}.{step + 1}"] = draw
                sigma = sigma_of(shift, timesteps[step + 1])
                x = (1 - sigma) * x0 + sigma * draw.transpose(0, 1).double()
        if chunk == 0:  # the first chunk runs on one cache, which then becomes every step's
            past = [[list(layer) for layer in past[-1]] for _ in steps]
        tensors["prepare_x0" if chunk == 0 else f"chunk{chunk:02d}.x0"] = _stored(x0)
        start += size
    meta = {
        "mode": "stream",
        "steps": steps,
        "kv_frames": window,
        "sink": sink,
        "adapt_thr": -1,
        "chunks": chunks,
    }
    save_file(inputs, out / "sdv2_inputs.safetensors")
    save_file(tensors, out / f"{case['case']}.safetensors")
    document = {
        "noise_scale": scales,
        "first_step_timestep": firsts,
        "shift": shift,
        "cases": {case["case"]: meta},
    }
    (out / "sdv2_meta.json").write_text(json.dumps({**document, "tokens_per_frame": h * w // 4}))


def _stored(x: torch.Tensor) -> torch.Tensor:
    return x.float().transpose(0, 1)[None].contiguous()
