# SPDX-License-Identifier: Apache-2.0
"""Generates clips chunk by chunk as in serving, with the K/V of earlier chunks and without
gradients.
"""

from functools import cache

import torch

from training.tiny_world.transformer import Clips, WorldTransformer, unpatchify


def _slot(frame: int, retained: int, sink: int) -> int:
    return frame if frame < sink else sink + (frame - sink) % (retained - sink)


@cache  # cached, because copying to the device blocks
def _allowed(
    window: int, sink: int, chunk: int, start: int, tokens: int, device: torch.device
) -> torch.Tensor:
    past = torch.zeros(window - chunk, dtype=torch.bool)
    oldest = start + chunk - (window - sink)
    for frame in range(start):
        if frame < sink or frame >= oldest:
            past[_slot(frame, window - chunk, sink)] = True
    both = torch.cat((past, torch.ones(chunk, dtype=torch.bool)))
    return both.repeat_interleave(tokens).to(device)


class ClipWindow:
    """K/V window of clips generated chunk by chunk, without gradients.

    The window has sink frames and a ring buffer like `KVWindow`, but no room for the chunk itself,
    so shapes are the same for every chunk.
    """

    def __init__(self, model: WorldTransformer, batch: int, chunk: int) -> None:
        sizes = model.sizes
        self.model, self.size = model, chunk
        self.kept = sizes.window - chunk
        if self.kept < sizes.sink:
            raise ValueError(
                f"a window of {sizes.window} frames has no room for {sizes.sink} sinks "
                f"beside {chunk}"
            )
        device = model.basis.device
        shape = (sizes.layers, 2, batch, sizes.heads, self.kept * sizes.tokens, sizes.head_dim)
        self.buffer = torch.zeros(shape, dtype=model.compute_dtype, device=device)
        self.written = 0

    def _slot(self, frame: int) -> int:
        return _slot(frame, self.kept, self.model.sizes.sink)

    def allowed(self, start: int) -> torch.Tensor:
        """Return the mask of the tokens that the chunk [start, ...) attends to, bool [tokens in the
        window + tokens in the chunk].
        """
        sizes = self.model.sizes
        return _allowed(
            sizes.window, sizes.sink, self.size, start, sizes.tokens, self.buffer.device
        )

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = self.model.sizes.tokens
        slots = [self._slot(start + offset) for offset in range(self.size)]
        together = slots == list(range(slots[0], slots[0] + self.size))
        count = self.size if together else 1
        for offset in range(0, self.size, count):
            slot, own = slots[offset] * tokens, slice(offset * tokens, (offset + count) * tokens)
            self.buffer[layer, 0, :, :, slot : slot + count * tokens] = k[:, :, own]
            self.buffer[layer, 1, :, :, slot : slot + count * tokens] = v[:, :, own]


class ChunkRun:
    """One chunk [start, start + size) of clips. Values shared by all forward passes are computed
    once.

    For use under `torch.no_grad` only.
    """

    def __init__(self, window: ClipWindow, clips: Clips, start: int) -> None:
        model = window.model
        self.window, self.model, self.start = window, model, start
        own = clips.frames(start, start + window.size)
        camera = model.camera(own)
        # A chunk uses a single prompt, that of its first frame.
        rows = torch.arange(len(own.text), device=own.text.device)
        text = model.text(own.text[rows, own.switched[:, 0].long()]).unsqueeze(1)
        self.camera = [block.camera(camera) for block in model._blocks()]
        self.text = [block.text_keys_values(text) for block in model._blocks()]
        self.condition = model.condition_patches(own.condition)
        self.cos, self.sin = (table.unsqueeze(1) for table in model.rotary(own.positions))
        self.allowed = window.allowed(start)

    def predict(
        self, latents: torch.Tensor, timestep: torch.Tensor, *, write: bool = False
    ) -> torch.Tensor:
        """Predict the flow of latents [B, f, 16, h, w] at timesteps [B, f]. If `write` is set,
        store the keys and values in the window. At timestep 0, the stored keys and values are those
        of clean frames.
        """
        model = self.model
        time, rows = model.time(timestep)
        x = model.patches(latents) + self.condition
        for layer, block in enumerate(model._blocks()):
            past = self.window.buffer[layer]
            x, k, v = block.chunk(
                x,
                rows,
                self.camera[layer],
                self.text[layer],
                self.cos,
                self.sin,
                past[0],
                past[1],
                self.allowed,
            )
            if write:
                self.window.write(layer, self.start, k, v)
        return unpatchify(model.head(x, time), model.sizes.grid)


@torch.no_grad()
def roll_out(
    model: WorldTransformer,
    clips: Clips,
    given: torch.Tensor,
    num_given: torch.Tensor,
    chunk: int,
    sigmas: tuple[float, ...],
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate clips chunk by chunk, as in serving.

    Return (latents [B, F, 16, h, w], step inputs [steps, B, F, 16, h, w]).

    `given` holds the true latents, [B, F, 16, h, w]. Each clip's first `num_given` [B] chunks are
    copied from `given`. The step inputs are the latents that the network received at each step:
    noise at the first step, and then its own x0 from the previous step with new noise added.
    """
    frames = given.shape[1]
    window = ClipWindow(model, len(given), chunk)
    made = torch.empty_like(given)
    inputs = given.new_empty(len(sigmas), *given.shape)
    for index, start in enumerate(range(0, frames, chunk)):
        run, own = ChunkRun(window, clips, start), slice(start, start + chunk)
        x = _noise(given[:, own], generator)
        x0 = x
        for step, sigma in enumerate(sigmas):
            if step:
                x = (1 - sigma) * x0 + sigma * _noise(x0, generator)
            inputs[step][:, own] = x
            time = x.new_full(x.shape[:2], 1000 * sigma)
            x0 = x - sigma * run.predict(x, time)
        x0 = torch.where((num_given > index).view(-1, 1, 1, 1, 1), given[:, own], x0)
        made[:, own] = x0
        if start + chunk < frames:
            run.predict(x0, x.new_zeros(x.shape[:2]), write=True)
    return made, inputs


def _noise(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
