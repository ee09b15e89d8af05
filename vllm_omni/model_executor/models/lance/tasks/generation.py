# SPDX-License-Identifier: Apache-2.0
"""`ImageGeneration`: one image or video while it is made: contexts, latents, schedule, guidance.

    first step
        the conditional context is written; the others copy the part that they share and add their
        rest
    N steps
        one velocity for each branch (conditional; the others while guidance acts), one Euler step

A denoise step writes its block's keys and values in front of the context and leaves the context
alone. Only `advance` changes a later step's inputs, so a step that failed may simply be run again.
Held by the golden files and tests/model_executor/models/lance/test_lance_pipeline.py.
"""

# K pictures, N latent tokens of one, C channels

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
    Visuals,
    position_segments,
)
from vllm_omni.model_executor.models.lance.tasks.prompt import Prompt
from vllm_omni.model_executor.models.lance.tasks.sampling import Guidance
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import (
    Grid,
    Segment,
    positions,
)
from vllm_omni.model_executor.step_cache import computed_steps


@dataclass(frozen=True)
class GenerationPlan:
    """Where every token of a drawing stands.

    `shared`: leading segments that `cond` and `uncond` have in common.

    cond, uncond, unseen: contexts without the block that is drawn; cond_block, uncond_block,
    unseen_block: that block's positions.
    """

    cond: list[ContextSegment]
    uncond: list[ContextSegment]
    unseen: list[ContextSegment]
    cond_block: torch.Tensor
    uncond_block: torch.Tensor
    unseen_block: torch.Tensor
    shared: int
    grid: Grid

    @property
    def num_latents(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def capacities(self) -> tuple[int, int, int]:
        """Tokens that caches of the contexts `cond`, `uncond` and `unseen` have room for."""
        cond, uncond, unseen = (
            padded_capacity(_length(each)) for each in (self.cond, self.uncond, self.unseen)
        )
        return cond, uncond, unseen

    @property
    def block(self) -> int:
        """Tokens of the block that is drawn: latents and two markers."""
        return self.num_latents + 2


def plan_generation(
    prompt: Prompt, uncond_positions: Literal["cond", "own"] = "cond"
) -> GenerationPlan:
    """Place the contexts of a prompt.

    Args:
        prompt: Segments of the request.
        uncond_positions: Positions of the text after the user's in the unconditional context.
            `cond`: those of the conditional context (as in the published results), unless a
            negative prompt replaces the user's text. `own`: consecutive positions. The generated
            block always has positions of its own context.
    """
    cond = position_segments(prompt.cond, positions(prompt.cond))
    uncond = position_segments(prompt.uncond, positions(prompt.uncond))
    unseen = position_segments(prompt.unseen, positions(prompt.unseen))
    shared = _common(prompt.cond, prompt.uncond)
    has_negative = any(segment.user for segment in prompt.uncond)
    if uncond_positions == "cond" and not has_negative:
        uncond = [
            *uncond[:-2],
            ContextSegment(uncond[-2].segment, cond[-2].positions_3T),
            uncond[-1],
        ]
    return GenerationPlan(
        cond=cond[:-1],
        uncond=uncond[:-1],
        unseen=unseen[:-1],
        cond_block=cond[-1].positions_3T,
        uncond_block=uncond[-1].positions_3T,
        unseen_block=unseen[-1].positions_3T,
        shared=shared,
        grid=prompt.cond[-1].grid,
    )


@dataclass(eq=False)
class ImageGeneration:
    """One request's working set.

    latents: fp32 [K, N, C], the first `pinned` tokens of each fixed. timesteps: num_steps + 1 of
    them, 1 to 0.
    cond, uncond, unseen: a cache per picture (the last two empty where their scale does not act).
    renorm_pinned: whether pinned tokens count in the guidance's global norm. step_cache: the
    threshold of `step_cache.py`, None = every step is computed.
    """

    plan: GenerationPlan
    visuals: Visuals
    guidance: Guidance
    timesteps: torch.Tensor
    latents: torch.Tensor
    cond: list[BranchCache]
    uncond: list[BranchCache]
    unseen: list[BranchCache] = field(default_factory=list)
    pinned: int = 0
    renorm_pinned: bool = True
    step_cache: float | None = None
    computed: tuple[bool, ...] = ()
    """Of each denoise step, known once the context is there: whether it is computed."""
    step: int = -1
    """The denoise step that comes next; -1 = the context has to be written first."""
    prediction: torch.Tensor | None = None
    """Of the step being run, or of the one computed last before it: fp32 velocities [branches,
    K, N, C].
    """

    cells: list[slice] = field(default_factory=list)
    """Of the forward being run: this drawing's `gen` tokens, conditional pictures first."""
    _time: torch.Tensor | None = None
    _positions: torch.Tensor | None = None
    _ropes: list[tuple[Rope, Rope]] = field(default_factory=list)
    _seen: dict[BranchCache, torch.Tensor] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.timesteps) - 1

    @property
    def prefilled(self) -> bool:
        return self.step >= 0

    @property
    def guided(self) -> bool:
        """Whether the current step needs more than the conditional branch."""
        return self._guided_at(self.step)

    def _guided_at(self, step: int) -> bool:
        return self.guidance.acts_at(float(self.timesteps[step]))

    @property
    def computes(self) -> bool:
        """Whether the current step needs the network."""
        return not self.prefilled or self.computed[self.step]

    # -- the context -------------------------------------------------------------------------------

    def add_context(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """First half of the first step: the conditional context, into the first picture's cache."""
        self.cond[0].length = 0
        writer.append_segments(builder, self.cond[0], self.plan.cond, self.visuals)

    def add_uncond_context(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """Second half, after that forward has run: copies, and the own text of the other
        contexts.
        """
        for cache in self.cond[1:]:
            cache.copy_context(self.cond[0], self.cond[0].length)
        if self.uncond:
            self.uncond[0].copy_context(self.cond[0], _length(self.plan.uncond[: self.plan.shared]))
            writer.append_segments(
                builder, self.uncond[0], self.plan.uncond[self.plan.shared :], self.visuals
            )
        if self.unseen:
            self.unseen[0].length = 0
            writer.append_segments(builder, self.unseen[0], self.plan.unseen, Visuals())

    def finish_context(self, writer: ContextWriter) -> None:
        """After the second forward: the inputs of every denoise step."""
        for branch in (self.uncond, self.unseen):
            for cache in branch[1:]:
                cache.copy_context(branch[0], branch[0].length)
        self._time = writer.network.time_embedder(self.timesteps.to(writer.device))
        self.computed = (True,) * self.num_steps
        if self.step_cache is not None:
            guided = [self._guided_at(step) for step in range(self.num_steps)]
            turns = {step for step in range(1, self.num_steps) if guided[step] != guided[step - 1]}
            self.computed = computed_steps(self._time[:-1], self.step_cache, turns)
        self._positions = writer.position_values(self.plan.grid)
        blocks = self.plan.cond_block, self.plan.uncond_block, self.plan.unseen_block
        self._ropes = [writer.block_rope(block) for block in blocks]
        for branch in (self.cond, self.uncond, self.unseen):
            self._seen |= dict.fromkeys(branch, writer.seen(branch[0])) if branch else {}

    # -- one denoise step --------------------------------------------------------------------------

    def add_step(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """Add the block of every picture and branch at the current step."""
        assert self._time is not None and self._positions is not None
        time = self._time[self.step]
        if self.pinned:
            time = time.expand(self.plan.num_latents, -1).clone()
            time[: self.pinned] = self._time[-1]
        branches = [self.cond, self.uncond, self.unseen] if self.guided else [self.cond]
        embeds = [
            writer.network.embed_latents(latents, time, self._positions) for latents in self.latents
        ]
        self.cells = [
            writer.add_block(builder, cache, embed, rope, self._seen[cache])
            for caches, rope in zip(branches, self._ropes, strict=False)
            if caches
            for cache, embed in zip(caches, embeds, strict=True)
        ]

    def release_caches(self) -> list[BranchCache]:
        """Return the caches of a drawing that is done, which keeps none."""
        released = self.cond + self.uncond + self.unseen
        self.cond, self.uncond, self.unseen, self._seen = [], [], [], {}
        return released

    def take_velocity(self, velocity_TC: torch.Tensor) -> None:
        """Cut this drawing's rows out of a forward's velocities."""
        rows = torch.stack([velocity_TC[cells] for cells in self.cells])
        self.prediction = rows.view(-1, len(self.cond), *rows.shape[1:])

    def advance(self) -> None:
        """Go to the next step: guide and take the Euler step, fp32; or begin, once the context
        is there.
        """
        if self.prefilled:
            self._euler()
        else:
            self.visuals = Visuals()
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


def _length(context: Sequence[ContextSegment]) -> int:
    return sum(placed.segment.length for placed in context)


def _common(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """Return how many leading segments both sequences share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other or one.user:
            break
        count += 1
    return count
