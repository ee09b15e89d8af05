# SPDX-License-Identifier: Apache-2.0
"""A second implementation of Lance's decoder: fp64, one dense masked pass over the whole sequence.

It shares no code with the package (the vision tower is transformers'). Tests of conventions without
recordings use it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

DRAW = (
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial "
    "relationships of the "
    "objects and background:"
)
FILM = (
    "Describe the video by detailing the color, quantity, visible text, shape, size, texture, "
    "spatial relationships "
    "and motion/camera movements of the objects and background:"
)
SPECIAL = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")


@dataclass(frozen=True)
class Run:
    """Consecutive tokens. kind: text, user, vit, reference, noise. grid: size of a visual run
    without its markers.
    """

    kind: str
    ids: list[int]
    grid: tuple[int, int, int] = (0, 0, 0)


class Reference:
    def __init__(self, sizes: dict[str, Any], seed: int) -> None:
        self.sizes, self.generator = sizes, torch.Generator().manual_seed(seed)
        words = sorted(
            {*DRAW, *FILM, "system", "user", "assistant", "\n"},
            key=lambda word: (-len(word), word),
        )
        self.vocabulary = {word: number for number, word in enumerate(words)}
        names = {name: f"<|{name}|>" for name in SPECIAL}
        self.special = {name: len(words) + 3 + number for number, name in enumerate(names.values())}
        self.id = {name: self.special[token] for name, token in names.items()}
        self.vocab_size = len(words) + 20
        self.w = self._weights()

    # -- weights -----------------------------------------------------------------------------------

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def _weights(self) -> dict[str, torch.Tensor]:
        s, width = self.sizes, self.sizes["hidden"]
        head = width // s["heads"]
        w: dict[str, torch.Tensor] = {}

        def matrix(name: str, rows: int, columns: int, bias: bool = False) -> None:
            w[f"{name}.weight"] = self.normal(rows, columns, scale=1 / math.sqrt(columns))
            if bias:
                w[f"{name}.bias"] = self.normal(rows, scale=0.1)

        for end in ("", "_moe_gen"):
            for n in range(s["layers"]):
                layer = f"language_model.model.layers.{n}"
                for name, heads in (("q", s["heads"]), ("k", s["kv_heads"]), ("v", s["kv_heads"])):
                    matrix(f"{layer}.self_attn.{name}_proj{end}", heads * head, width, bias=True)
                matrix(f"{layer}.self_attn.o_proj{end}", width, s["heads"] * head)
                for name in ("q", "k"):
                    w[f"{layer}.self_attn.{name}_norm{end}.weight"] = 1 + self.normal(
                        head, scale=0.2
                    )
                matrix(f"{layer}.mlp{end}.gate_proj", s["ffn"], width)
                matrix(f"{layer}.mlp{end}.up_proj", s["ffn"], width)
                matrix(f"{layer}.mlp{end}.down_proj", width, s["ffn"])
                for name in ("input_layernorm", "post_attention_layernorm"):
                    w[f"{layer}.{name}{end}.weight"] = 1 + self.normal(width, scale=0.2)
            w[f"language_model.model.norm{end}.weight"] = 1 + self.normal(width, scale=0.2)
        w["language_model.model.embed_tokens.weight"] = self.normal(self.vocab_size, width)
        matrix("language_model.lm_head", self.vocab_size, width)
        matrix("time_embedder.mlp.0", width, 256, bias=True)
        matrix("time_embedder.mlp.2", width, width, bias=True)
        matrix("vae2llm", width, 48, bias=True)
        matrix("llm2vae", 48, width, bias=True)
        w["latent_pos_embed.pos_embed"] = self.table().float()
        torch.manual_seed(1)
        config = Qwen2_5_VLConfig(vision_config=self.vision_config()).vision_config
        config._attn_implementation = "sdpa"
        self.tower = Qwen2_5_VisionTransformerPretrainedModel(config).eval()
        return w | {
            f"vit_model.{name}": value.clone() for name, value in self.tower.state_dict().items()
        }

    def vision_config(self) -> dict[str, Any]:
        s = self.sizes
        return {
            "depth": s["vit_layers"],
            "hidden_act": "silu",
            "hidden_size": s["vit_hidden"],
            "intermediate_size": s["vit_ffn"],
            "num_heads": s["vit_heads"],
            "in_channels": 3,
            "out_hidden_size": s["hidden"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [s["vit_layers"] - 1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        }

    def table(self) -> torch.Tensor:
        """Positions of every (frame, row, column), frame slowest: sine and cosine of each axis."""
        s = self.sizes
        third = s["hidden"] // 3 // 2 * 2
        parts = []
        grid = torch.cartesian_prod(
            *(torch.arange(n) for n in (s["latent_frames"], s["latent_size"], s["latent_size"]))
        )
        for axis, size in enumerate((third, third, s["hidden"] - 2 * third)):
            omega = 10000.0 ** (-torch.arange(size // 2, dtype=torch.float64) / (size / 2))
            angles = grid[:, axis, None].double() * omega
            parts += [angles.sin(), angles.cos()]
        return torch.cat(parts, dim=1)

    # -- sequences ---------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            word = next(word for word in self.vocabulary if text.startswith(word))  # longest first
            ids.append(self.vocabulary[word])
            text = text[len(word) :]
        return ids

    def block(self, kind: str, grid: tuple[int, int, int]) -> Run:
        pads = [self.id["video_pad"]] * math.prod(grid)
        return Run(kind, [self.id["vision_start"], *pads, self.id["vision_end"]], grid)

    def sequence(self, system: str, user: str, blocks: list[Run], noise: Run | None) -> list[Run]:
        start, end = self.id["im_start"], self.id["im_end"]
        head = [start, *self.encode("system\n"), *self.encode(system), end, *self.encode("\n")]
        head += [start, *self.encode("user\n")]
        separator = [end, *self.encode("\n"), start, *self.encode("assistant\n")]
        runs = [Run("text", head), *blocks, Run("user", self.encode(user)), Run("text", separator)]
        return [*runs, noise, Run("text", [end])] if noise is not None else runs

    @staticmethod
    def positions(runs: list[Run]) -> list[torch.Tensor]:
        placed, at = [], 0
        for run in runs:
            if sum(run.grid) == 0:
                placed.append(torch.arange(at, at + len(run.ids)).repeat(3, 1))
                at += len(run.ids)
                continue
            rows = [(at, at, at)]
            frames, height, width = run.grid
            rows += [
                (at + 1 + 2 * f, at + 1 + i, at + 1 + j)
                for f in range(frames)
                for i in range(height)
                for j in range(width)
            ]
            at = max(max(row) for row in rows[1:]) + 1
            rows.append((at, at, at))
            at += 1
            placed.append(torch.tensor(rows).T)
        return placed

    # -- the network -------------------------------------------------------------------------------

    def matmul(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.w.get(f"{name}.bias")
        return linear(x, self.w[f"{name}.weight"].double(), None if bias is None else bias.double())

    def rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            * self.w[f"{name}.weight"].double()
        )

    def both(
        self, function: Any, name: str, tail: str, x: torch.Tensor, gen: torch.Tensor
    ) -> torch.Tensor:
        """Apply the expert of each token."""
        return torch.where(
            gen[:, None], function(f"{name}_moe_gen{tail}", x), function(f"{name}{tail}", x)
        )

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate halves of x [S, heads, head]. Each frequency follows its axis."""
        head = x.shape[-1]
        owner = torch.tensor(
            [axis for axis, count in enumerate(self.sizes["mrope"]) for _ in range(count)]
        )
        frequency = self.sizes["theta"] ** (
            -2 * torch.arange(head // 2, dtype=torch.float64) / head
        )
        angle = (positions[owner].double() * frequency[:, None]).T[:, None]
        a, b = x[..., : head // 2], x[..., head // 2 :]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1
        )

    def forward(
        self, runs: list[Run], placed: list[torch.Tensor], fills: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return final hidden states [S, D]. fills: embeddings of visual runs by kind."""
        s = self.sizes
        ids = torch.tensor([number for run in runs for number in run.ids])
        x = self.w["language_model.model.embed_tokens.weight"].double()[ids].clone()
        owner = torch.tensor([index for index, run in enumerate(runs) for _ in run.ids])
        gen = torch.zeros(len(ids), dtype=torch.bool)
        at = 0
        for run in runs:
            if run.kind in fills:
                cells = slice(at + 1, at + len(run.ids) - 1)
                x[cells] = fills[run.kind].double()
                gen[cells] = run.kind != "vit"
            at += len(run.ids)
        kinds = [run.kind for run in runs]
        visual = torch.tensor([kind in ("vit", "reference", "noise") for kind in kinds])[owner]
        noise = torch.tensor([kind == "noise" for kind in kinds])[owner]
        same = owner[:, None] == owner[None]
        order = torch.arange(len(ids))
        allowed = ((order[None] <= order[:, None]) | (same & visual[None])) & ~(noise[None] & ~same)
        positions = torch.cat(placed, dim=1)
        heads, kv_heads, head = s["heads"], s["kv_heads"], s["hidden"] // s["heads"]
        for n in range(s["layers"]):
            layer = f"language_model.model.layers.{n}"
            h = self.both(self.rms, f"{layer}.input_layernorm", "", x, gen)
            q, k, v = (
                self.both(self.matmul, f"{layer}.self_attn.{name}_proj", "", h, gen).view(
                    len(ids), -1, head
                )
                for name in "qkv"
            )
            gen_heads = gen[:, None, None]

            def head_norm(
                name: str, rows: torch.Tensor, gen_heads: torch.Tensor = gen_heads
            ) -> torch.Tensor:
                return torch.where(
                    gen_heads, self.rms(f"{name}_moe_gen", rows), self.rms(name, rows)
                )

            q = self.turn(head_norm(f"{layer}.self_attn.q_norm", q), positions)
            k = self.turn(head_norm(f"{layer}.self_attn.k_norm", k), positions)
            mixed = []
            for number in range(heads):
                shared = number * kv_heads // heads
                score = (q[:, number] @ k[:, shared].T / math.sqrt(head)).masked_fill(
                    ~allowed, -math.inf
                )
                mixed.append(score.softmax(-1) @ v[:, shared])
            x = x + self.both(
                self.matmul, f"{layer}.self_attn.o_proj", "", torch.cat(mixed, dim=1), gen
            )
            h = self.both(self.rms, f"{layer}.post_attention_layernorm", "", x, gen)
            gate = self.both(self.matmul, f"{layer}.mlp", ".gate_proj", h, gen)
            up = self.both(self.matmul, f"{layer}.mlp", ".up_proj", h, gen)
            x = x + self.both(self.matmul, f"{layer}.mlp", ".down_proj", silu(gate) * up, gen)
        return self.both(self.rms, "language_model.model.norm", "", x, gen)

    def per_latent(
        self, latents: torch.Tensor, grid: tuple[int, int, int], times: torch.Tensor
    ) -> torch.Tensor:
        """Latents [n, 48] -> decoder inputs."""
        size = self.sizes["latent_size"]
        cells = torch.cartesian_prod(*(torch.arange(n) for n in grid))
        where = (cells[:, 0] * size + cells[:, 1]) * size + cells[:, 2]
        frequency = torch.exp(-math.log(10000.0) * torch.arange(128, dtype=torch.float64) / 128)
        angle = times.double()[:, None] * frequency
        time = self.matmul("time_embedder.mlp.0", torch.cat((angle.cos(), angle.sin()), dim=1))
        time = self.matmul("time_embedder.mlp.2", silu(time))
        return self.matmul("vae2llm", latents.double()) + time + self.table()[where]


def write_model(directory: Path, model: Reference) -> None:
    """Write `state_dict` and `meta_fp32.json`, from which `ToyModel` is built."""
    sizes = model.sizes
    llm = {
        "vocab_size": model.vocab_size,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": sizes["theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": sizes["mrope"]},
    }
    latent = {
        "max_num_frames": 4 * sizes["latent_frames"] - 3,
        "max_latent_size": sizes["latent_size"],
    }
    config = {"llm": llm, "vit": model.vision_config(), "latent": latent, "specials": model.special}
    meta = {"precision": "fp32", "config": config, "toy_vocab": model.vocabulary}
    (directory / "meta_fp32.json").write_text(json.dumps(meta))
    save_file(
        {name: value.contiguous() for name, value in model.w.items()},
        directory / "state_dict.safetensors",
    )
