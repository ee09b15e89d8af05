# SPDX-License-Identifier: Apache-2.0
"""The transformer written down a second time, as plainly as possible: fp64, one dict of weights, a
list as K/V buffer.

Shares no code with the package. Records golden directories of any architecture, to check `verify`
on what it has never seen, and the network on sizes that were never recorded from the original.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, silu

Weights = dict[str, torch.Tensor]


def random_weights(cfg: dict[str, Any], generator: torch.Generator) -> Weights:
    """Weights in original names; gains around one, so that forgetting one shows."""
    d, patch = cfg["dim"], 4
    shapes = {
        "patch_embedding": (d, cfg["in_dim"], 1, 2, 2),
        "patch_embedding_wancamctrl": (d, 384 * patch),
        "c2ws_hidden_states_layer1": (d, d),
        "c2ws_hidden_states_layer2": (d, d),
        "text_embedding.0": (d, cfg["text_dim"]),
        "text_embedding.2": (d, d),
        "time_embedding.0": (d, cfg["freq_dim"]),
        "time_embedding.2": (d, d),
        "time_projection.1": (6 * d, d),
        "head.head": (cfg["out_dim"] * patch, d),
    }
    for n in range(cfg["num_layers"]):
        for name in ("self_attn", "cross_attn"):
            shapes |= {f"blocks.{n}.{name}.{part}": (d, d) for part in "qkvo"}
        for name in (
            "cam_injector_layer1",
            "cam_injector_layer2",
            "cam_scale_layer",
            "cam_shift_layer",
        ):
            shapes[f"blocks.{n}.{name}"] = (d, d)
        shapes[f"blocks.{n}.ffn.0"], shapes[f"blocks.{n}.ffn.2"] = (
            (cfg["ffn_dim"], d),
            (d, cfg["ffn_dim"]),
        )

    def normal(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = {"head.modulation": normal((1, 2, d), 0.5)}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = normal(shape, 1 / math.sqrt(math.prod(shape[1:])))
        weights[f"{name}.bias"] = normal(shape[:1], 0.1)
    for n in range(cfg["num_layers"]):
        weights[f"blocks.{n}.modulation"] = normal((1, 6, d), 0.5)
        weights[f"blocks.{n}.norm3.bias"] = normal((d,), 0.1)
        gains = [
            "norm3",
            *(f"{kind}.norm_{part}" for kind in ("self_attn", "cross_attn") for part in "qk"),
        ]
        weights |= {f"blocks.{n}.{gain}.weight": 1 + normal((d,), 0.2) for gain in gains}
    return weights


class Reference:
    """`cache[layer]` holds the visible (k, v), oldest first: append, and drop behind the sinks
    when full.
    """

    def __init__(
        self, cfg: dict[str, Any], weights: Weights, tokens_per_frame: int, cache_tokens: int
    ) -> None:
        self.cfg = cfg
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.sink = cfg["sink_size"] * tokens_per_frame
        self.cache_tokens = self.attention_tokens = cache_tokens
        self.cache = [(torch.zeros(0), torch.zeros(0))] * cfg["num_layers"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].flatten(1).T + self.w[f"{name}.bias"]

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], eps=self.cfg["eps"])

    def rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.cfg["eps"]).sqrt()
            * self.w[f"{name}.weight"]
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, D], [S, D], [S, D] -> [T, D], head by head."""
        heads = self.cfg["num_heads"]
        parts = []
        for qh, kh, vh in zip(
            q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True
        ):
            parts.append((qh @ kh.T / math.sqrt(qh.shape[-1])).softmax(-1) @ vh)
        return torch.cat(parts, -1)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """positions: [T, 3] of frame, row, column."""
        head = self.cfg["dim"] // self.cfg["num_heads"]
        sixth = head // 6
        sizes = (head - 4 * sixth, 2 * sixth, 2 * sixth)
        angles = torch.cat(
            [
                positions[:, axis, None]
                * 10000.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
                for axis, size in enumerate(sizes)
            ],
            dim=1,
        )
        turn = torch.polar(torch.ones_like(angles), angles)
        heads = torch.view_as_complex(x.reshape(len(x), -1, head // 2, 2))
        return torch.view_as_real(heads * turn[:, None]).reshape(len(x), -1)

    def patches(self, x: torch.Tensor) -> torch.Tensor:
        """[c, F, h, w] -> [F h/2 w/2, 4 c] in (channel, row, column) order, one token at a time."""
        _, frames, height, width = x.shape
        return torch.stack(
            [
                x[:, f, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(-1)
                for f in range(frames)
                for i in range(height // 2)
                for j in range(width // 2)
            ]
        )

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        camera: torch.Tensor,
        text: torch.Tensor,
        t: float,
        start: int,
        new: bool,
    ) -> torch.Tensor:
        """Return the flow of a chunk starting at latent frame `start`; `new`: its tokens are not
        in the cache yet.
        """
        _, frames, height, width = x.shape
        d = self.cfg["dim"]
        tokens = self.linear("patch_embedding", self.patches(torch.cat((x, y)).double()))
        grid = torch.cartesian_prod(
            torch.arange(start, start + frames), *map(torch.arange, (height // 2, width // 2))
        )
        positions = grid.double()
        half = self.cfg["freq_dim"] // 2
        phase = t * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        e = self.linear("time_embedding.0", torch.cat((phase.cos(), phase.sin())).float().double())
        e = self.linear("time_embedding.2", silu(e))
        steps = self.linear("time_projection.1", silu(e)).view(6, d)
        rows = torch.zeros(self.cfg["text_len"], self.cfg["text_dim"], dtype=torch.float64)
        rows[: len(text)] = text
        words = self.linear(
            "text_embedding.2", gelu(self.linear("text_embedding.0", rows), approximate="tanh")
        )
        p = self.linear("patch_embedding_wancamctrl", self.patches(camera.double()))
        c = p + self.linear(
            "c2ws_hidden_states_layer2", silu(self.linear("c2ws_hidden_states_layer1", p))
        )
        for n in range(self.cfg["num_layers"]):
            b = f"blocks.{n}"
            s1, k1, g1, s2, k2, g2 = self.w[f"{b}.modulation"][0] + steps
            h = self.norm(tokens) * (1 + k1) + s1
            q = self.rotate(
                self.rms(f"{b}.self_attn.norm_q", self.linear(f"{b}.self_attn.q", h)), positions
            )
            k = self.rotate(
                self.rms(f"{b}.self_attn.norm_k", self.linear(f"{b}.self_attn.k", h)), positions
            )
            keys, values = self.remember(n, k, self.linear(f"{b}.self_attn.v", h), new)
            tokens = tokens + g1 * self.linear(f"{b}.self_attn.o", self.attend(q, keys, values))
            hc = (
                self.linear(
                    f"{b}.cam_injector_layer2", silu(self.linear(f"{b}.cam_injector_layer1", c))
                )
                + c
            )
            tokens = (1 + self.linear(f"{b}.cam_scale_layer", hc)) * tokens + self.linear(
                f"{b}.cam_shift_layer", hc
            )
            h = self.norm(tokens) * self.w[f"{b}.norm3.weight"] + self.w[f"{b}.norm3.bias"]
            q = self.rms(f"{b}.cross_attn.norm_q", self.linear(f"{b}.cross_attn.q", h))
            k = self.rms(f"{b}.cross_attn.norm_k", self.linear(f"{b}.cross_attn.k", words))
            across = self.attend(q, k, self.linear(f"{b}.cross_attn.v", words))
            tokens = tokens + self.linear(f"{b}.cross_attn.o", across)
            h = self.norm(tokens) * (1 + k2) + s2
            tokens = tokens + g2 * self.linear(
                f"{b}.ffn.2", gelu(self.linear(f"{b}.ffn.0", h), approximate="tanh")
            )
        shift, scale = self.w["head.modulation"][0] + e
        out = self.linear("head.head", self.norm(tokens) * (1 + scale) + shift)
        flow = torch.zeros(self.cfg["out_dim"], frames, height, width, dtype=torch.float64)
        for token, (f, i, j) in enumerate(grid.tolist()):
            f -= start
            flow[:, f, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = (
                out[token].view(2, 2, -1).permute(2, 0, 1)
            )
        return flow

    def remember(
        self, n: int, k: torch.Tensor, v: torch.Tensor, new: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        retained = []
        for old, fresh in zip(self.cache[n], (k, v), strict=True):
            if not new:
                old = old[: -len(fresh)]
            elif len(old) == 0:
                old = fresh[:0]
            evicted = max(0, len(old) + len(fresh) - self.cache_tokens)
            retained.append(torch.cat((old[: self.sink], old[self.sink + evicted :], fresh)))
        self.cache[n] = (retained[0], retained[1])
        return retained[0][-self.attention_tokens :], retained[1][-self.attention_tokens :]


def record(
    directory: Path,
    cfg: dict[str, Any],
    *,
    chunk: int,
    chunks: int,
    height: int,
    width: int,
    seed: int,
    attention: int | None = None,
    stored: torch.dtype = torch.float32,
) -> None:
    """Write weights, inputs and one scenario with the original's schedule (t truncated to
    integers).

    attention: of the newest tokens that are seen; None = all that are kept. stored: dtype of
    weights and inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: tensor.to(stored) for name, tensor in random_weights(cfg, generator).items()}
    frames = chunk * chunks
    inputs = {
        "noise": torch.randn(16, frames, height, width, generator=generator),
        "y": torch.randn(20, frames, height, width, generator=generator),
        "camera": torch.randn(1, 384, frames, height, width, generator=generator),
        "context": torch.randn(cfg["text_len"] - 2, cfg["text_dim"], generator=generator),
    }
    inputs = {name: tensor.to(stored) for name, tensor in inputs.items()}
    frame_tokens = height * width // 4
    cache_tokens = (
        frames if cfg["local_attn_size"] == -1 else cfg["local_attn_size"]
    ) * frame_tokens
    reference = Reference(cfg, weights, frame_tokens, cache_tokens)
    reference.attention_tokens = attention or cache_tokens
    shift, indices = 4.0, (0, 333, 777)
    table = [float(torch.tensor(0.999).item()) * (1 - i / 1000) for i in range(1000)]
    table = [shift * s / (1 + (shift - 1) * s) for s in table]
    times = [int(1000 * s) for s in table]
    out: dict[str, torch.Tensor] = {
        "sched.timesteps": torch.tensor([times[index] for index in indices])
    }
    for k in range(chunks):
        part = slice(k * chunk, (k + 1) * chunk)
        row = (inputs["y"][:, part], inputs["camera"][0][:, part], inputs["context"].double())
        x = inputs["noise"][:, part].float()
        for i, index in enumerate(indices):
            same = [j for j, t in enumerate(times) if t == times[index]]
            flow = reference.forward(x, *row, float(times[index]), k * chunk, new=i == 0).float()
            out[f"c{k}.s{i}.flow"] = flow
            x0 = (
                x.double()
                - float(torch.tensor(table[same[0]], dtype=torch.float32)) * flow.double()
            ).float()
            if i + 1 < len(indices):
                following = [j for j, t in enumerate(times) if t == times[indices[i + 1]]]
                sigma = float(
                    torch.tensor(table[following[min(1, len(following) - 1)]], dtype=torch.float32)
                )
                eps = out[f"c{k}.s{i}.eps"] = torch.randn(x.shape, generator=generator)
                x = ((1 - sigma) * x0.double() + sigma * eps.double()).float()
        reference.forward(x0, *row, 0.0, k * chunk, new=False)
        out[f"c{k}.latent"] = x0
        heads = (cfg["num_heads"], cfg["dim"] // cfg["num_heads"])
        for n in range(cfg["num_layers"]):
            for kind, retained in zip("kv", reference.cache[n], strict=True):
                buffer = torch.zeros(1, cache_tokens, *heads)
                buffer[0, : len(retained)] = retained.float().view(-1, *heads)
                out[f"c{k}.kv{n}.{kind}"] = buffer
        valid = len(reference.cache[0][0])
        out[f"c{k}.ends"] = torch.tensor([(k + 1) * chunk * frame_tokens, valid])
    metadata = {
        "cfg": json.dumps(cfg),
        "index": json.dumps(indices),
        "chunk": str(chunk),
        "nchunks": str(chunks),
        "shift": str(shift),
        "frame_seqlen": str(frame_tokens),
        "kv_size": str(cache_tokens),
        "max_attention_size": str(attention or cache_tokens),
        "dtype": "float32",
        "lat_hw": json.dumps([height, width]),
    }
    save_file(weights, directory / "dit_tiny_weights.safetensors", {"cfg": json.dumps(cfg)})
    save_file(inputs, directory / "dit_inputs.safetensors")
    save_file(out, directory / "dit_unseen.safetensors", metadata)
