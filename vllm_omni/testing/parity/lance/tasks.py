# SPDX-License-Identifier: Apache-2.0
"""Compares Lance's tasks with recordings: prompts, sampling, responses and vision tower.

Prompts are built from this package's templates with the recorded vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.model_executor.models.lance.config import READING_TASKS, Task
from vllm_omni.model_executor.models.lance.network.vision import decoder_grid, to_patches
from vllm_omni.model_executor.models.lance.tasks.context import VisualContents, position_segments
from vllm_omni.model_executor.models.lance.tasks.generation import ImageGeneration, plan_generation
from vllm_omni.model_executor.models.lance.tasks.prompt import (
    IM_END,
    VISION_END,
    VISION_PAD,
    VISION_START,
    PromptSegments,
    build_prompt,
)
from vllm_omni.model_executor.models.lance.tasks.sampling import (
    ClassifierFreeGuidance,
    flow_timesteps,
)
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import (
    Grid,
    SequenceSegment,
    positions,
    raw_positions,
)
from vllm_omni.testing.parity.comparison import GoldenScenario
from vllm_omni.testing.parity.lance.recorded import (
    LATENT,
    STAGE,
    Fp32Judge,
    Judge,
    ToyModel,
    greedy,
)

_SHIFT, _SCALE, _INTERVAL = 3.5, 4.0, (0.4, 1.0)
VARIANTS = {
    "": ClassifierFreeGuidance(_SCALE, _INTERVAL, "global", 0.0),
    "cfg1": ClassifierFreeGuidance(1.0, _INTERVAL, "global", 0.0),
    "interval": ClassifierFreeGuidance(_SCALE, (0.6, 1.0), "global", 0.0),
    "channel": ClassifierFreeGuidance(_SCALE, _INTERVAL, "channel", 0.0),
    "norenorm": ClassifierFreeGuidance(_SCALE, _INTERVAL, "none", 0.0),
}
"""Guidance settings of each recorded variant of a task. The recordings do not contain these
settings.
"""


@dataclass(frozen=True)
class TaskInputs:
    """Inputs of one recorded task."""

    task: Task
    """The recorded task."""
    prompt: PromptSegments
    """Prompt of the task, built from the recorded text."""
    vit_grid: Grid | None
    """Grid of the vision tower's output, or None if the task has no visual input."""
    reference: torch.Tensor | None
    """Latents of the reference image, or None if the task has no reference image."""
    noise: torch.Tensor | None
    """Initial noise for sampling, or None for understanding tasks."""
    first_frame: torch.Tensor | None
    """Latents of the first frame, or None if the task does not specify a first frame."""
    visuals: VisualContents
    """Embeddings of the task's visual inputs."""

    @classmethod
    def read_scenario(cls, scenario: GoldenScenario, model: ToyModel, task: Task) -> "TaskInputs":
        ids = scenario.get(f"{task}.packed_text_ids").tolist()
        vit_grid = reference = noise = first_frame = None
        rows = None
        if f"{task}.vit_grid_thw" in scenario:
            patches = tuple(scenario.get(f"{task}.vit_grid_thw")[0].tolist())
            vit_grid = decoder_grid(patches)
            rows = model.vision(scenario.get(f"{task}.vit_pixels"), patches)
        if f"{task}.ref_latent" in scenario:
            reference = scenario.get(f"{task}.ref_latent")
        target = None
        if task not in READING_TASKS:
            path = "kv" if f"{task}.kv.latent" in scenario else "nokv"
            recorded = scenario.get(f"{task}.{path}.latent")
            target = tuple(recorded.shape[:3])
            noise = scenario.get(f"{task}.noise")[-recorded.shape[:3].numel() :]
        if f"{task}.cond_latent" in scenario:
            first_frame = scenario.get(f"{task}.cond_latent")[0].flatten(0, 1)
        user, system = _texts(scenario, model, task, ids)
        prompt = build_prompt(
            task,
            model.tokens,
            user,
            system_prompt=system,
            vit=vit_grid,
            reference=None if reference is None else tuple(reference.shape[:3]),  # type: ignore[arg-type]
            noise=target,  # type: ignore[arg-type]
        )
        visuals = VisualContents(rows, None if reference is None else reference.flatten(0, 2))
        return cls(task, prompt, vit_grid, reference, noise, first_frame, visuals)


def _texts(
    scenario: GoldenScenario, model: ToyModel, task: Task, ids: list[int]
) -> tuple[str, str | None]:
    """Return the user's text and, for understanding tasks, the system prompt.

    Only understanding requests contain their own system prompt.
    """
    if task not in READING_TASKS:
        modality = scenario.get(f"{task}.sample_modality").tolist()
        return model.text(
            [number for number, kind in zip(ids, modality, strict=True) if kind == 0]
        ), None
    end = model.special[IM_END]
    vision_end = len(ids) - 1 - ids[::-1].index(model.special[VISION_END])
    user = ids[vision_end + 1 : ids.index(end, vision_end)]
    return model.text(user), model.text(ids[3 : ids.index(end)])


def compare_packing(scenario: GoldenScenario, model: ToyModel, inputs: TaskInputs) -> None:
    """Compare token ids, modalities, splits, positions and masks, which must equal the recorded
    ones.
    """
    task = inputs.task

    def equal(stage: str, ours: Any, name: str, size: int | None = None) -> None:
        if name in scenario:
            recorded = scenario.get(name)
            recorded = recorded if size is None else recorded[..., :size]
            scenario.compare(
                f"{task}: {stage}", torch.as_tensor(ours).reshape(recorded.shape), recorded, 0.0
            )

    understanding = task in READING_TASKS
    closing = SequenceSegment("text", ids=(model.special[IM_END],))
    cond = [*inputs.prompt.cond] if understanding else [*inputs.prompt.cond, closing]
    ids = [number for segment in cond for number in _ids(segment, model)]
    if understanding:
        equal("ids", ids, f"{task}.prompt_ids")
        equal("ids", ids, f"{task}.packed_text_ids", len(ids))
        equal("splits", [segment.length for segment in cond[:2]], f"{task}.split_lens", 2)
        if f"{task}.ce_loss_indexes" in scenario:
            response = len(ids) - 1 + torch.arange(len(scenario.get(f"{task}.ce_loss_indexes")))
            equal("answer's place", response, f"{task}.ce_loss_indexes")
        if f"{task}.mrope" in scenario:
            where = torch.cat(positions(cond), dim=1)
            after = scenario.get(f"{task}.mrope").shape[2] - len(ids)
            following = int(where[0, -1]) + 1 + torch.arange(after).expand(3, -1)
            equal("positions", torch.cat((where, following), dim=1).unsqueeze(1), f"{task}.mrope")
    else:
        uncond = [*inputs.prompt.uncond, closing]
        equal("ids", ids, f"{task}.packed_text_ids")
        modality = [segment.modality for segment in cond for _ in range(segment.length)]
        equal("modality", modality, f"{task}.sample_modality")
        equal("splits", [segment.length for segment in cond], f"{task}.split_lens")
        equal("positions", torch.cat(raw_positions(cond), dim=1).unsqueeze(1), f"{task}.mrope_raw")
        equal("positions", torch.cat(positions(cond), dim=1).unsqueeze(1), f"{task}.mrope_shifted")
        equal("positions", torch.cat(positions(uncond), dim=1).unsqueeze(1), f"{task}.mrope_uncond")
        equal("mask", attention_allowed(cond).to(torch.uint8), f"{task}.attn_allowed")
    packing = model.packing.get(f"{task}.")
    if packing is not None:
        modes = [segment.mode for segment in cond]
        if modes != packing["attn_modes"]:
            raise ValueError(
                f"{task}: attention modes are {modes}, recorded {packing['attn_modes']}"
            )
    blocks = [segment for segment in cond if segment.kind in ("reference", "noise")]
    equal("grids", _grids(inputs, blocks), f"{task}.video_grid_thw")
    sizes = [
        (1 + 4 * (block.grid[0] - 1), 16 * block.grid[1], 16 * block.grid[2]) for block in blocks
    ]
    equal("sizes", sizes, f"{task}.video_sizes")
    if inputs.first_frame is not None:
        start = sum(segment.length for segment in cond[:-2]) + 1
        free = torch.arange(start + len(inputs.first_frame), start + cond[-2].num_cells)
        equal("free tokens", free, f"{task}.mse_loss_indexes")
    if inputs.visuals.vit is not None:
        judge = Fp32Judge(scenario)
        judge(f"{task}: vision tower", inputs.visuals.vit, f"{task}.vit_embed", STAGE)
        if f"{task}.vit_video_cthw" in scenario:
            patches, _ = to_patches(scenario.get(f"{task}.vit_video_cthw"))
            judge(f"{task}: patches", patches, f"{task}.vit_pixels", 0.0)


def _ids(segment: SequenceSegment, model: ToyModel) -> list[int]:
    if segment.kind == "text":
        return list(segment.ids)
    pad = model.special[VISION_PAD]
    return [model.special[VISION_START], *([pad] * segment.num_cells), model.special[VISION_END]]


def _grids(inputs: TaskInputs, blocks: Sequence[SequenceSegment]) -> list[Grid]:
    """Return the grids in the units of the original: patches, and latents with both sides
    doubled.
    """
    vision = (
        []
        if inputs.vit_grid is None
        else [(inputs.vit_grid[0], 2 * inputs.vit_grid[1], 2 * inputs.vit_grid[2])]
    )
    return [*vision, *((block.grid[0], 2 * block.grid[1], 2 * block.grid[2]) for block in blocks)]


def compare_task(
    scenario: GoldenScenario, model: ToyModel, inputs: TaskInputs, variant: str, judge: Judge
) -> None:
    if inputs.task in READING_TASKS:
        _compare_text(scenario, model, inputs, judge)
        return
    name = inputs.task if not variant else f"{inputs.task}_{variant}"
    for path in ("kv", "nokv"):
        if f"{name}.{path}.latent" in judge.scenario:
            _compare_generation(scenario, model, inputs, variant, f"{name}.{path}", judge)


def _compare_generation(
    scenario: GoldenScenario,
    model: ToyModel,
    inputs: TaskInputs,
    variant: str,
    recorded: str,
    judge: Judge,
) -> None:
    """Compare the sampling of a task, starting from the recorded noise, with the recording.

    In the original's code path without a K/V cache, the unconditional context has its own
    positions, so recordings of this path are compared with `uncond_positions="own"`.
    """
    cached = recorded.endswith(".kv")
    steps = _num_steps(scenario, inputs.task)
    plan = plan_generation(inputs.prompt, "cond" if cached else "own")
    sizes = plan.capacities()
    guidance = VARIANTS[variant]
    decoder = model.network.language_model
    assert inputs.noise is not None
    latents = inputs.noise.float().clone()
    pinned = 0
    if inputs.first_frame is not None:
        pinned = len(inputs.first_frame)
        latents[:pinned] = inputs.first_frame
    generation = ImageGeneration(
        plan=plan,
        visuals=inputs.visuals,
        guidance=guidance,
        timesteps=flow_timesteps(steps, _SHIFT),
        latents=latents[None],
        cond=[decoder.new_cache(sizes[0], plan.block)],
        uncond=[decoder.new_cache(sizes[1], plan.block)] if guidance.enabled else [],
        pinned=pinned,
        renorm_pinned=cached,
    )
    model.stepper.step([generation], [])
    generation.advance()
    label, forward = recorded.rpartition(".")[0], 0
    tail, cells = slice(-plan.num_latents, None), slice(1, -1)
    context = [cache.length for cache in (*generation.cond, *generation.uncond)]
    for step in range(steps):
        judge(
            f"{label}: noisy latents", generation.latents[0], f"{recorded}.x_t{step}", STAGE, tail
        )
        model.stepper.step([generation], [])
        assert generation.prediction is not None
        for velocity in generation.prediction[:, 0]:
            judge(f"{label}: velocity", velocity, f"{recorded}.llm2vae{forward}", STAGE, cells)
            forward += 1
        generation.advance()
    if context != [cache.length for cache in (*generation.cond, *generation.uncond)]:
        raise ValueError(f"{recorded}: a denoise step changed the length of a context")
    final = generation.latents[0].view(*plan.grid, -1)
    judge(
        f"{label}: final latents ({recorded.rpartition('.')[2]})",
        final,
        f"{recorded}.latent",
        LATENT,
    )


def _num_steps(scenario: GoldenScenario, task: Task) -> int:
    """Return the number of denoise steps of a task, from its recorded `x_t`."""
    steps = max(
        sum(name.startswith(f"{task}.{path}.x_t") for name in scenario.tensors)
        for path in ("kv", "nokv")
    )
    if steps == 0:
        raise ValueError(f"{task} has no x_t: the number of its steps is unknown")
    return steps


def _compare_text(
    scenario: GoldenScenario, model: ToyModel, inputs: TaskInputs, judge: Judge
) -> None:
    context = position_segments(inputs.prompt.cond, positions(inputs.prompt.cond))
    for path in ("kv", "nokv"):
        name = f"{inputs.task}.{path}"
        if f"{name}.tokens" not in judge.scenario:
            continue
        steps = len(judge.scenario.get(f"{name}.tokens"))
        tokens, logits = greedy(model, context, inputs.visuals, steps, model.special[IM_END])
        judge(f"{inputs.task}: tokens ({path})", tokens, f"{name}.tokens", 0.0)
        judge(f"{inputs.task}: logits ({path})", logits, f"{name}.logits", STAGE)


def attention_allowed(segments: Sequence[SequenceSegment]) -> torch.Tensor:
    """Return the dense attention mask, bool [S, S], indexed by query and then by key."""
    owner = torch.cat(
        [torch.full((segment.length,), index) for index, segment in enumerate(segments)]
    )
    size = len(owner)
    same = owner[:, None] == owner[None, :]
    block = torch.tensor([segment.kind != "text" for segment in segments])[owner]
    noise = torch.tensor([segment.kind == "noise" for segment in segments])[owner]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    return (causal | (same & block[None, :])) & ~(noise[None, :] & ~same)
