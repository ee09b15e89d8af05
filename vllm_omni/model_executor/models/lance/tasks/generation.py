# SPDX-License-Identifier: Apache-2.0
"""The state of an image or video generation (`ImageGeneration`): contexts, latents, schedule and
guidance.

    first step
        write the contexts; if two contexts share a reference, the second copies the shared part
    N steps
        compute a velocity for each branch (the conditional branch, and the other branches while
        guidance applies), and run one Euler step

A denoise step writes the keys and values of its block to the slots before the context and does not
modify the context. Only `advance` changes the inputs of later steps, so a failed step can be
repeated. This module is tested against the golden files and by
tests/model_executor/models/lance/test_lance_pipeline.py.
"""

# K images, N latent tokens per image, C channels

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vllm_omni.model_executor.models.lance.network.pack import (
    BranchCache,
    PackBuilder,
    padded_capacity,
)
from vllm_omni.model_executor.models.lance.tasks.context import (
    ContextSegment,
    ContextWriter,
    Rope,
    VisualContents,
    position_segments,
)
from vllm_omni.model_executor.models.lance.tasks.prompt import PromptSegments
from vllm_omni.model_executor.models.lance.tasks.sampling import ClassifierFreeGuidance
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import (
    Grid,
    SequenceSegment,
    block_positions,
    positions,
)
from vllm_omni.model_executor.step_cache import computed_steps


@dataclass(frozen=True)
class GenerationPlan:
    """The contexts of a generation and the positions of all its tokens. The contexts do not include
    the generated block.
    """

    cond: list[ContextSegment]
    """Conditional context, with all segments of the prompt."""
    uncond: list[ContextSegment]
    """Context without the user's text."""
    unseen: list[ContextSegment]
    """Context without the reference."""
    cond_block: torch.Tensor
    """Positions of the generated block after `cond`."""
    uncond_block: torch.Tensor
    """Positions of the generated block after `uncond`."""
    unseen_block: torch.Tensor
    """Positions of the generated block after `unseen`."""
    shared: int
    """Number of leading segments that `cond` and `uncond` have in common."""
    grid: Grid
    """Size of the generated block in latent cells, (T, h, w)."""

    @property
    def shares_reference(self) -> bool:
        """Return whether `cond` and `uncond` have a reference in common. Text is too short to be
        worth a second forward pass.
        """
        return not _is_text(self.uncond[: self.shared])

    @property
    def has_reference(self) -> bool:
        """Return whether `cond` contains anything but text."""
        return not _is_text(self.cond)

    @property
    def num_latents(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def capacities(self) -> tuple[int, int, int]:
        """Return the cache capacities for `cond`, `uncond` and `unseen`, in tokens."""
        cond, uncond, unseen = (
            padded_capacity(_length(each)) for each in (self.cond, self.uncond, self.unseen)
        )
        return cond, uncond, unseen

    @property
    def block(self) -> int:
        """Return the number of tokens in the generated block: one per latent, and two markers."""
        return self.num_latents + 2


def plan_generation(
    prompt: PromptSegments,
    uncond_positions: Literal["cond", "own"],
    noise_before_text: bool = False,
) -> GenerationPlan:
    """Assign positions to a prompt's contexts.

    Args:
        prompt: The prompt's segments.
        uncond_positions: With `cond`, the text after the user's text has the same positions as in
            the conditional context, provided that both contexts end with this text and no negative
            prompt replaces the user's text. Otherwise, its positions are recomputed. The generated
            block's positions always follow from the context that the block belongs to.
        noise_before_text: Whether the generated block's positions start where the user's text
            starts, in both contexts. The block still attends to all of the text.
    """
    cond = position_segments(prompt.cond, positions(prompt.cond))
    uncond = position_segments(prompt.uncond, positions(prompt.uncond))
    unseen = position_segments(prompt.unseen, positions(prompt.unseen))
    shared = _common(prompt.cond, prompt.uncond)
    has_negative = any(segment.user for segment in prompt.uncond)
    same_end = prompt.uncond[-2:] == prompt.cond[-2:]
    if uncond_positions == "cond" and same_end and not has_negative:
        uncond = [
            *uncond[:-2],
            ContextSegment(uncond[-2].segment, cond[-2].positions_3T),
            uncond[-1],
        ]
    cond_block, uncond_block = cond[-1].positions_3T, uncond[-1].positions_3T
    if noise_before_text:
        user = next(placed for placed in cond if placed.segment.user)
        cond_block = uncond_block = block_positions(
            int(user.positions_3T[0, 0]), prompt.cond[-1].grid
        )
    return GenerationPlan(
        cond=cond[:-1],
        uncond=uncond[:-1],
        unseen=unseen[:-1],
        cond_block=cond_block,
        uncond_block=uncond_block,
        unseen_block=unseen[-1].positions_3T,
        shared=shared,
        grid=prompt.cond[-1].grid,
    )


@dataclass(eq=False)
class ImageGeneration:
    """Working set of one image or video generation."""

    plan: GenerationPlan
    """Positions of all tokens."""
    visuals: VisualContents
    """Embeddings of the reference, which are cleared after the contexts have been written."""
    guidance: ClassifierFreeGuidance
    """Settings of classifier-free guidance."""
    timesteps: torch.Tensor
    """The `num_steps` + 1 timesteps from 1 to 0."""
    latents: torch.Tensor
    """Latents of all images, fp32 [K, N, C]."""
    cond: list[BranchCache]
    """Caches of the conditional context, one per image."""
    uncond: list[BranchCache]
    """Caches of the context without the user's text, one per image. The list is empty if there is
    no guidance against this context.
    """
    unseen: list[BranchCache] = field(default_factory=list)
    """Caches of the context without the reference, one per image. The list is empty if there is no
    guidance against this context.
    """
    pinned: int = 0
    """Number of leading latent tokens that do not change, because they belong to the first frame,
    which the client has sent.
    """
    renorm_pinned: bool = True
    """Whether pinned tokens are included in the global norm of the guidance."""
    step_cache: float | None = None
    """Threshold for skipping denoise steps (`step_cache.py`). None: no steps are skipped."""
    computed: tuple[bool, ...] = ()
    """For each denoise step, whether it is computed rather than skipped. Set by `prepare_steps`."""
    step: int = -1
    """Index of the next denoise step, or -1 until the contexts have been written."""
    prediction: torch.Tensor | None = None
    """Velocities from the last computed denoise step, fp32 [branches, K, N, C]."""

    cells: list[slice] = field(default_factory=list)
    """Ranges of this generation's `gen` tokens in the current forward pass. The ranges of the
    conditional branch come first.
    """
    _time: torch.Tensor | None = None
    """Embeddings of `timesteps`, computed by `prepare_steps`."""
    _positions: torch.Tensor | None = None
    """Position embeddings of the latent tokens."""
    _ropes: list[tuple[Rope, Rope]] = field(default_factory=list)
    """Result of `block_rope` for the block of each branch that has caches."""
    _seen: dict[BranchCache, torch.Tensor] = field(default_factory=dict)
    """`TokenPack.seen` entry for each cache."""

    @property
    def num_steps(self) -> int:
        return len(self.timesteps) - 1

    @property
    def prefilled(self) -> bool:
        return self.step >= 0

    @property
    def guided(self) -> bool:
        """Return whether the current step needs branches other than the conditional one."""
        return self._guided_at(self.step)

    def _guided_at(self, step: int) -> bool:
        return self.guidance.acts_at(float(self.timesteps[step]))

    @property
    def computes(self) -> bool:
        """Return whether the current step needs a forward pass."""
        return not self.prefilled or self.computed[self.step]

    # -- the context -------------------------------------------------------------------------------

    def prepare_steps(self, writer: ContextWriter) -> None:
        """Prepare the inputs for all denoise steps. Call this before the first forward pass,
        because copies from the host would wait for the pass.
        """
        self._time = writer.network.time_embedder(self.timesteps.to(writer.device))
        self.computed = (True,) * self.num_steps
        if self.step_cache is not None:
            guided = [self._guided_at(step) for step in range(self.num_steps)]
            changes = {
                step for step in range(1, self.num_steps) if guided[step] != guided[step - 1]
            }
            self.computed = computed_steps(self._time[:-1], self.step_cache, changes)
        self._positions = writer.position_values(self.plan.grid)
        self._ropes = []
        for branch, context, block in (
            (self.cond, self.plan.cond, self.plan.cond_block),
            (self.uncond, self.plan.uncond, self.plan.uncond_block),
            (self.unseen, self.plan.unseen, self.plan.unseen_block),
        ):
            if branch:
                self._ropes.append(writer.block_rope(block))
                seen = writer.seen(branch[0].block + _length(context))
                self._seen |= dict.fromkeys(branch, seen)

    def add_context(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """Add the contexts to the step's first forward pass, which writes them to the first image's
        caches. If the contexts share a reference, `add_rest_of_uncond` adds the context without the
        user's text.
        """
        contexts = [(self.cond, self.plan.cond), (self.unseen, self.plan.unseen)]
        if not self.plan.shares_reference:
            contexts.append((self.uncond, self.plan.uncond))
        for caches, context in contexts:
            if caches and _is_text(context):
                writer.add_text_context(builder, caches[0], context)
            elif caches:
                caches[0].length = 0
                writer.append_segments(builder, caches[0], context, self.visuals)

    def add_rest_of_uncond(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """If the contexts share a reference, copy the shared part to the context without the user's
        text, and add the remaining part to the step's second forward pass.
        """
        if self.uncond and self.plan.shares_reference:
            shared = self.plan.shared
            self.uncond[0].copy_context(self.cond[0], _length(self.plan.uncond[:shared]))
            writer.append_segments(builder, self.uncond[0], self.plan.uncond[shared:], self.visuals)

    def share_contexts(self) -> None:
        """Copy the contexts to the other images' caches. Call this after the second forward
        pass.
        """
        for branch in (self.cond, self.uncond, self.unseen):
            for cache in branch[1:]:
                cache.copy_context(branch[0], branch[0].length)

    # -- one denoise step --------------------------------------------------------------------------

    def add_step(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """Add the blocks of all images and branches for the current step to the forward pass."""
        assert self._time is not None and self._positions is not None
        time = self._time[self.step]
        if self.pinned:
            time = time.expand(self.plan.num_latents, -1).clone()
            time[: self.pinned] = self._time[-1]
        branches = [each for each in (self.cond, self.uncond, self.unseen) if each]
        if not self.guided:
            branches = branches[:1]
        embeds = [
            writer.network.embed_latents(latents, time, self._positions) for latents in self.latents
        ]
        self.cells = [
            writer.add_block(builder, cache, embed, rope, self._seen[cache])
            for caches, rope in zip(branches, self._ropes, strict=False)
            for cache, embed in zip(caches, embeds, strict=True)
        ]

    def release_caches(self) -> list[BranchCache]:
        """Return the caches of a completed generation and drop the references to them."""
        released = self.cond + self.uncond + self.unseen
        self.cond, self.uncond, self.unseen, self._seen = [], [], [], {}
        return released

    def take_velocity(self, velocity_TC: torch.Tensor) -> None:
        """Store this generation's part of `velocity_TC`, which contains the velocities of all
        generations in the forward pass.
        """
        rows = torch.stack([velocity_TC[cells] for cells in self.cells])
        self.prediction = rows.view(-1, len(self.cond), *rows.shape[1:])

    def advance(self) -> None:
        """Apply guidance and an Euler step in fp32, and advance to the next step. If only the
        contexts have been written, advance to the first denoise step.
        """
        if self.prefilled:
            self._euler()
        else:
            self.visuals = VisualContents()
        self.step += 1

    def _euler(self) -> None:
        velocities_BKNC = self.prediction
        assert velocities_BKNC is not None
        counted = slice(None) if self.renorm_pinned else slice(self.pinned, None)
        delta = float(self.timesteps[self.step] - self.timesteps[self.step + 1])
        updated = []
        for image, latents in enumerate(self.latents):
            velocity, *others = velocities_BKNC[:, image]
            if others:
                uncond = others.pop(0) if self.uncond else None
                unseen = others.pop(0) if self.unseen else None
                velocity = self.guidance.combine(velocity, uncond, unseen, counted)
            moved = latents - velocity * delta
            if self.pinned:
                moved[: self.pinned] = latents[: self.pinned]
            updated.append(moved)
        self.latents = torch.stack(updated)


def _is_text(context: Sequence[ContextSegment]) -> bool:
    return all(placed.segment.kind == "text" for placed in context)


def _length(context: Sequence[ContextSegment]) -> int:
    return sum(placed.segment.length for placed in context)


def _common(first: Sequence[SequenceSegment], second: Sequence[SequenceSegment]) -> int:
    """Return the number of leading segments that both sequences have in common. Counting stops
    before the user's text.
    """
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other or one.user:
            break
        count += 1
    return count
