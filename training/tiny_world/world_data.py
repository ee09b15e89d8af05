# SPDX-License-Identifier: Apache-2.0
"""Training clips on the device: shards, prompts, and batches that cover all kinds of sessions.

Batches include the situations that can occur in a served session: prompts that change during a clip
(the same walk in another style), frames far from the start (later positions, and sink frames of
another walk), and both chunk lengths. All random numbers are drawn on the device.

`--embed-prompts OUT.pt` writes the prompt embeddings. Only this option needs the whole `vllm_omni`
package.

`clips.py` writes the shards. Tested by tests/training/tiny_world/test_world_data.py.
"""

# N clips of a shard, B clips of a batch, F latent frames

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.tiny_world.transformer import CONDITION, LATENTS, Clips, Sizes
from training.tiny_world.village import PERIOD
from vllm_omni.model_executor.models.lingbot_world.world_pose import frame_features

CONDITION_FRAMES = 6
"""Number of latent frames that a shard stores for the condition. All later frames equal the last
stored frame.
"""

SHIPPED = Path(__file__).parents[2] / "vllm_omni" / "worlds" / "village"
"""Directory of the shipped world. All training runs use its text encoder."""

_FIELDS = ("latents", "condition", "relative", "positions", "angles", "focal", "style", "twin")


class Prompts:
    """Embedded prompts by style: fp32 [prompts, X, E] on a device, with zeros after the end of each
    prompt.
    """

    def __init__(self, rows: torch.Tensor, counts: Sequence[int]) -> None:
        self.rows = rows
        self.counts = torch.tensor(counts, device=rows.device)
        self.starts = self.counts.cumsum(0) - self.counts

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "Prompts":
        saved = torch.load(path, map_location="cpu", weights_only=True)
        by_style = [saved["embeddings"][style] for style in saved["styles"]]
        return cls(torch.cat(by_style).to(device), [len(rows) for rows in by_style])

    def draw(self, style_B: torch.Tensor) -> torch.Tensor:
        """Draw a random prompt for each style in `style_B`, and return [B, X, E]."""
        count = self.counts[style_B]
        return self.rows[self.starts[style_B] + _below(count)]


def _below(count: torch.Tensor) -> torch.Tensor:
    """Draw a random integer in [0, count) for each count."""
    drawn = (torch.rand(count.shape, device=count.device) * count).long()
    return drawn.minimum(count - 1)


class Shard:
    """Clips on one device, with the fields that `clips.py` writes."""

    def __init__(
        self, fields: Mapping[str, torch.Tensor], device: torch.device, sizes: Sizes
    ) -> None:
        missing = [name for name in _FIELDS if name not in fields]
        if missing:
            raise ValueError(f"the shard has no {', '.join(missing)}; it has {', '.join(fields)}")
        num, frames = fields["latents"].shape[:2]
        wanted = {
            "latents": (num, frames, LATENTS, *sizes.grid),
            "condition": (num, CONDITION_FRAMES, LATENTS, *sizes.grid),
            "relative": (num, frames, 3, 4),
            "positions": (num, frames, 2),
            "angles": (num, frames, 2),
            "focal": (num,),
            "style": (num,),
            "twin": (num,),
        }
        for name, shape in wanted.items():
            if tuple(fields[name].shape) != shape:
                raise ValueError(
                    f"{name} of a shard must be {list(shape)}, got {list(fields[name].shape)}"
                )
        focals = torch.tensor(sizes.focals)
        away = (fields["focal"].float().unsqueeze(1) - focals).abs()
        if float(away.min(dim=1).values.max()) > 0.5:
            raise ValueError(f"the shard has focal lengths that are not of {sizes.focals}")
        self.latents = fields["latents"].to(device, torch.float16)
        self.condition = fields["condition"].to(device, torch.float16)
        self.motion = fields["relative"].to(device, torch.float32)
        positions = fields["positions"].to(device, torch.float64)
        self.place = (
            frame_features(positions.flatten(0, 1), PERIOD).float().unflatten(0, (num, frames))
        )
        yaw, pitch = fields["angles"].to(device, torch.float32).unbind(-1)
        self.rotation = rotations(yaw, pitch)
        self.focal = away.argmin(dim=1).to(device)
        self.style = fields["style"].to(device, torch.int64)
        self.twin = fields["twin"].to(device, torch.int64)
        self.by_style = self.style.argsort(stable=True)
        self.style_counts = torch.bincount(self.style, minlength=3)
        self.style_starts = self.style_counts.cumsum(0) - self.style_counts

    def __len__(self) -> int:
        return len(self.latents)

    @property
    def frames(self) -> int:
        return self.latents.shape[1]

    @classmethod
    def load(cls, paths: Sequence[Path], device: torch.device, sizes: Sizes) -> "Shard":
        """Read several files as one shard, and adjust the indices of twins (the same walk in
        another style).
        """
        parts = [
            torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths
        ]
        if not parts:
            raise ValueError("no shard to read")
        before = 0
        for part in parts:
            part["twin"] = torch.where(part["twin"] >= 0, part["twin"] + before, part["twin"])
            before += len(part["latents"])
        return cls(
            {name: torch.cat([part[name] for part in parts]) for name in _FIELDS}, device, sizes
        )


def find_shards(folder: Path, rank: int, world: int) -> list[Path]:
    """Return the files `clips-N.pt` that this rank reads: every `world`-th one.

    Raises ValueError if there are no files.
    """
    numbered = sorted(
        (int(path.stem.removeprefix("clips-")), path)
        for path in folder.glob("clips-*.pt")
        if path.stem.removeprefix("clips-").isdigit()
    )
    own = [path for number, path in numbered if number % world == rank]
    if not own:
        raise ValueError(
            f"{folder} has no clips-N.pt for rank {rank} of {world}; it has {len(numbered)} shards"
        )
    return own


def rotations(yaw: torch.Tensor, pitch: torch.Tensor) -> torch.Tensor:
    """Return camera-to-world rotations [..., 3, 3] for yaw (to the right) and pitch (upwards) in
    radians.
    """
    cy, sy, cp, sp = yaw.cos(), yaw.sin(), pitch.cos(), pitch.sin()
    zero = torch.zeros_like(yaw)
    return torch.stack(
        (cy, sy * sp, sy * cp, zero, cp, -sp, -sy, cy * sp, cy * cp), dim=-1
    ).unflatten(-1, (3, 3))


@dataclass(frozen=True)
class Mix:
    """Settings for drawing batches. All values are probabilities per clip unless stated otherwise.

    With probability `switch`, the prompt changes during the clip if the walk exists in another
    style. With probability `far`, the clip plays up to `far_frames` latent frames after the start
    and has sink frames from another walk. `other_sink` is the share of far clips whose sink frames
    can have any style.

    `few` is the probability that a chunk's noise level is one of `sigmas`. All other noise levels
    are continuous, with `shift`. `noisy_context` is the probability that noise of at most
    `context_sigma` is added to a clean chunk. `second_chunk` is the loss weight of frames 3 to 5,
    which have the least context. With probability `unknown`, the world pose is left out.

    `crop` is the number of latent frames in a packed clip: the walk's first frames are the sink
    frames, and the others are consecutive frames from a random position (with probability `start`,
    from the beginning). With probability `other_context`, the clean frames come from another walk,
    so only the pose determines the result.
    """

    sigmas: tuple[float, ...]
    switch: float = 0.3
    far: float = 0.3
    far_frames: int = 2400
    other_sink: float = 0.25
    few: float = 0.75
    shift: float = 5.0
    noisy_context: float = 0.6
    context_sigma: float = 0.3
    second_chunk: float = 1.5
    unknown: float = 0.15
    crop: int = 36
    start: float = 0.3
    other_context: float = 0.05


def few_step_sigmas(
    shift: float = 5.0, indices: Sequence[int] = (0, 250, 500, 750)
) -> tuple[float, ...]:
    """Return the sigmas used to denoise a served chunk. The defaults are LingBot World v2's `exact`
    schedule.
    """
    flat = (1 - index / 1000 for index in indices)
    return tuple(shift * sigma / (1 + (shift - 1) * sigma) for sigma in flat)


@dataclass
class Batch:
    """A training batch. `latents`, fp32 [B, F, 16, h, w], holds the ground-truth latents.
    `weights`, fp32 [B, F], holds the frames' loss weights, with a mean of about 1.
    """

    latents: torch.Tensor
    clips: Clips
    weights: torch.Tensor


class Sampler:
    """Draws batches from a shard. `chunk_B` is the chunk length of each clip in a batch, which is
    the same for all batches.

    With `whole`, batches contain whole clips from their beginning. Without `whole`, batches contain
    crops (`Mix.crop`).
    """

    def __init__(
        self,
        shard: Shard,
        prompts: Prompts,
        sizes: Sizes,
        mix: Mix,
        chunk_B: torch.Tensor,
        *,
        whole: bool = False,
    ) -> None:
        self.shard, self.prompts, self.sizes, self.mix = shard, prompts, sizes, mix
        self.device = shard.latents.device
        self.frames = shard.frames if whole else min(mix.crop, shard.frames)
        self.chunk_B1 = chunk_B.to(self.device).unsqueeze(1)
        self.frame_F = torch.arange(self.frames, device=self.device)
        self.first_BF = self.frame_F // self.chunk_B1 * self.chunk_B1
        """Index of the first frame in each frame's chunk."""
        self.few = torch.tensor(mix.sigmas, device=self.device)

    def draw(self) -> Batch:
        """Draw a batch that covers all kinds of sessions."""
        batch = len(self.chunk_B1)
        index = torch.randint(len(self.shard), (batch,), device=self.device)
        return self.batch(
            index,
            self._chance(batch, self.mix.switch),
            self._chance(batch, self.mix.far),
            self._chance(batch, self.mix.unknown),
            self.crops(batch),
        )

    def crops(self, batch: int) -> torch.Tensor:
        """Draw the number of latent frames that each crop leaves out after its sink frames,
        [batch]. Each number is a multiple of three.
        """
        most = (self.shard.frames - self.frames) // 3
        drawn = 3 * (torch.rand(batch, device=self.device) * (most + 1)).long()
        return torch.where(self._chance(batch, self.mix.start), 0, drawn)

    def batch(
        self,
        index_B: torch.Tensor,
        switches_B: torch.Tensor,
        far_B: torch.Tensor,
        unknown_B: torch.Tensor | None = None,
        crop_B: torch.Tensor | None = None,
    ) -> Batch:
        """Return a batch of the given clips. `switches_B` affects only clips with a twin. If
        `unknown_B` is None, all poses are known. If `crop_B` is None, no frames are left out.
        """
        shard, sizes, batch = self.shard, self.sizes, len(index_B)
        sink_F = self.frame_F < sizes.sink
        crop_B = torch.zeros_like(index_B) if crop_B is None else crop_B
        frame_BF = self.frame_F + torch.where(sink_F, 0, crop_B.unsqueeze(1))
        style = shard.style[index_B]
        sink_clip = torch.where(far_B, self._another_walk(style), index_B)
        sink_style = shard.style[sink_clip]
        # If the sink frames have another style, the prompt changed long ago and does not change
        # again in this clip.
        long_ago = sink_style != style
        twin = shard.twin[index_B]
        switches = switches_B & (twin >= 0) & ~long_ago
        other = torch.where(switches, twin, index_B)
        start = (
            sizes.sink
            + (torch.rand(batch, 1, device=self.device) * self._num_switches()).long()
            * self.chunk_B1
        )
        start = torch.where(long_ago.unsqueeze(1), sizes.sink, start)
        switched = (switches | long_ago).unsqueeze(1) & (self.frame_F >= start)

        walk = torch.where(sink_F, sink_clip.unsqueeze(1), index_B.unsqueeze(1))
        recorded = torch.where(switched, other.unsqueeze(1), walk)
        latents = shard.latents[recorded, frame_BF].float()
        motion = shard.motion[walk, frame_BF]
        known = 1.0 if unknown_B is None else (~unknown_B).float().view(-1, 1, 1)
        position = shard.place[walk, frame_BF] * known
        rotation = shard.rotation[walk, frame_BF] * (
            known if isinstance(known, float) else known.unsqueeze(-1)
        )

        # A clip far from the start uses only the last frame of the condition.
        last = far_B.unsqueeze(1) & ~sink_F
        row = torch.where(last, CONDITION_FRAMES - 1, frame_BF.clamp(max=CONDITION_FRAMES - 1))
        image = shard.condition[sink_clip.unsqueeze(1), row].float()
        mask = image.new_zeros(batch, self.frames, CONDITION - LATENTS, *sizes.grid)
        mask[:, 0] = 1
        shift = (
            torch.rand(batch, 1, device=self.device) * self.mix.far_frames
        ).long() * far_B.unsqueeze(1)

        clips = Clips(
            condition=torch.cat((mask, image), dim=2),
            motion=motion,
            focal=shard.focal[index_B],
            text=torch.stack(
                (self.prompts.draw(sink_style), self.prompts.draw(shard.style[other])), dim=1
            ),
            switched=switched,
            positions=frame_BF + shift * ~sink_F,
            rotation=rotation,
            place=position,
        )
        # Without the previous frames or a pose, nothing determines the first frames after a gap.
        gap = far_B | (crop_B > 0)
        lost = gap if unknown_B is None else gap & unknown_B
        second = (self.frame_F >= sizes.sink) & (self.frame_F < sizes.sink + 3)
        weights = torch.ones(batch, self.frames, device=self.device)
        second_weight = torch.where(gap, torch.where(lost, 0.0, 1.0), self.mix.second_chunk)
        weights = torch.where(second, second_weight.unsqueeze(1), weights)
        return Batch(latents, clips, weights)

    def context(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the clean frames for training, with a little noise. In some clips, they are
        replaced with the clean frames of the previous clip in the batch.
        """
        swapped = self._chance(len(latents), self.mix.other_context).view(-1, 1, 1, 1, 1)
        shown = torch.where(swapped, latents.roll(1, dims=0), latents)
        return noised(shown, self.context_levels(), torch.randn_like(latents))

    def noise_levels(self) -> torch.Tensor:
        """Draw a sigma for each frame, [B, F]. All frames of a chunk have the same sigma."""
        shape = self.first_BF.shape
        chosen = self.few[torch.randint(len(self.few), shape, device=self.device)]
        flat = torch.rand(shape, device=self.device) * 0.98 + 0.02
        warped = self.mix.shift * flat / (1 + (self.mix.shift - 1) * flat)
        return self._by_chunk(torch.where(self._chance(shape, self.mix.few), chosen, warped))

    def context_levels(self) -> torch.Tensor:
        """Draw the noise level of each clean frame, [B, F]. All frames of a chunk have the same
        level.
        """
        shape = self.first_BF.shape
        level = torch.rand(shape, device=self.device) * self.mix.context_sigma
        return self._by_chunk(level * self._chance(shape, self.mix.noisy_context))

    def _by_chunk(self, values_BF: torch.Tensor) -> torch.Tensor:
        return values_BF.gather(1, self.first_BF)

    def _num_switches(self) -> torch.Tensor:
        """Return the number of chunks at which a prompt can change, [B, 1]."""
        return (self.frames - self.sizes.sink) // self.chunk_B1

    def _chance(self, shape: int | torch.Size, probability: float) -> torch.Tensor:
        return torch.rand(shape, device=self.device) < probability

    def _another_walk(self, style_B: torch.Tensor) -> torch.Tensor:
        shard, batch = self.shard, len(style_B)
        same = shard.by_style[shard.style_starts[style_B] + _below(shard.style_counts[style_B])]
        anyone = torch.randint(len(shard), (batch,), device=self.device)
        return torch.where(self._chance(batch, self.mix.other_sink), anyone, same)


def noised(latents: torch.Tensor, sigma_BF: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return (1 - sigma) x0 + sigma eps, with one sigma per frame."""
    sigma = sigma_BF[:, :, None, None, None]
    return (1 - sigma) * latents + sigma * noise


def synthetic_shard(num: int, frames: int, sizes: Sizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a shard's fields with smooth, moving random latents, for tests of the trainer. The
    latents do not represent real images.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, columns = sizes.grid
    style = torch.arange(num) % 3
    field = torch.randn(3, LATENTS, rows, columns, generator=generator)
    latents = torch.stack(
        [
            torch.stack(
                [field[int(style[clip])].roll(frame + clip, dims=-1) for frame in range(frames)]
            )
            for clip in range(num)
        ]
    )
    turn = torch.linspace(-0.1, 0.1, num)[:, None].expand(num, frames)
    zero, one = torch.zeros_like(turn), torch.ones_like(turn)
    matrix = (
        turn.cos(),
        zero,
        turn.sin(),
        zero,
        zero,
        one,
        zero,
        zero,
        -turn.sin(),
        zero,
        turn.cos(),
        one,
    )
    return {
        "latents": latents.half(),
        "condition": latents[:, :CONDITION_FRAMES].half(),
        "relative": torch.stack(matrix, dim=-1).view(num, frames, 3, 4),
        "positions": torch.randn(num, frames, 2, generator=generator),
        "angles": torch.stack((turn.cumsum(1), zero), dim=-1),
        "focal": torch.tensor(sizes.focals)[torch.arange(num) % len(sizes.focals)],
        "style": style.to(torch.uint8),
        "twin": torch.where(torch.arange(num) < num - 1, torch.arange(num) + 1, -1),
    }


def synthetic_prompts(sizes: Sizes, counts: Sequence[int] = (3, 3, 3)) -> dict[str, Any]:
    """Return data in the format that `--embed-prompts` writes, with random embeddings."""
    generator = torch.Generator().manual_seed(1)
    styles = [f"style {number}" for number in range(len(counts))]
    rows = [
        torch.randn(count, sizes.text_len, sizes.text_dim, generator=generator) for count in counts
    ]
    return {"styles": styles, "embeddings": dict(zip(styles, rows, strict=True))}


def embed_prompts(
    prompts: Mapping[str, Sequence[str]], sizes: Sizes, world: Path = SHIPPED
) -> dict[str, Any]:
    """Embed prompts with the text encoder of the `world` checkpoint. Raises ValueError if a prompt
    is too long and would be truncated.

    This encoder's weights are random, and other versions of torch and transformers would draw
    different weights. A world trained on one encoder's embeddings cannot be used with those of
    another encoder.

    Embeddings after the end of a prompt are zero and take part in attention, as in the served
    network.
    """
    from vllm_omni.model_executor.models.wan.text_encoder.encoder import TextEncoder
    from vllm_omni.testing.tiny.wan import TEXT

    tokenizer = world / "google" / "umt5-xxl"
    encoder = TextEncoder(TEXT, tokenizer, max_tokens=sizes.text_len + 1, dtype=torch.float32)
    encoder.load(world / "models_t5_umt5-xxl-enc-bf16.pth")
    embedded: dict[str, torch.Tensor] = {}
    for style, texts in prompts.items():
        rows = torch.zeros(len(texts), sizes.text_len, sizes.text_dim)
        for index, text in enumerate(texts):
            length = len(encoder.prompts.tokenize(text))
            if length > sizes.text_len:
                raise ValueError(
                    f"prompt {text!r} has more than {sizes.text_len} tokens: it would be cut"
                )
            rows[index, :length] = encoder.encode(text)
        embedded[style] = rows
    return {
        "styles": list(prompts),
        "embeddings": embedded,
        "prompts": {s: list(p) for s, p in prompts.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Embed all prompts of the tiny world (needs vllm_omni)."
    )
    parser.add_argument("--embed-prompts", type=Path, required=True, metavar="OUT.pt")
    parser.add_argument(
        "--text-encoder", type=Path, default=SHIPPED, help="checkpoint whose text encoder it is"
    )
    options = parser.parse_args(arguments)
    from training.tiny_world.prompts import PROMPTS, STYLES  # type: ignore[import-not-found,unused-ignore]

    saved = embed_prompts(
        {style: PROMPTS[style] for style in STYLES}, Sizes(), options.text_encoder
    )
    torch.save(saved, options.embed_prompts)
    longest = max(int((rows != 0).any(-1).sum(-1).max()) for rows in saved["embeddings"].values())
    counts = ", ".join(f"{style} {len(rows)}" for style, rows in saved["embeddings"].items())
    print(f"{options.embed_prompts}: {counts} prompts, at most {longest} tokens")


if __name__ == "__main__":
    main()


def write_synthetic_data(folder: Path, sizes: Sizes, ranks: int, clips: int, frames: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        torch.save(synthetic_shard(clips, frames, sizes, rank), folder / f"clips-{rank}.pt")
    torch.save(synthetic_shard(clips, frames, sizes, 99), folder / "clips-held.pt")
    torch.save(synthetic_prompts(sizes), folder / "prompts.pt")
