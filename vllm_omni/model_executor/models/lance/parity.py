# SPDX-License-Identifier: Apache-2.0
"""Lance against golden files: decoder, latent bridge, packing, sampling of every task, vision tower, autoencoder.

Everything is driven by the recordings and their metadata, so any directory of the same layout can be verified: other
sizes, layers, heads, prompts, seeds. Prompts are rebuilt from this package's templates with the recorded vocabulary.

Tolerances. fp32: 2e-5 per stage, 1e-4 for final latents; ids, masks, positions and greedy tokens exactly. bf16:
relative L2 distance to the recorded bf16 result, allowed 2 % or twice what that result is away from the recorded fp32
one (two independent roundings of that size). Greedy tokens in bf16 are compared up to the first step that bf16 cannot
decide: its two best logits are nearer than 2 % of the largest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.layers.parallel import checkpoint_slots
from vllm_omni.model_executor.models.lance.config import READING_TASKS, TASKS, LanceConfig, Task, default_dtype
from vllm_omni.model_executor.models.lance.context import PlacedSegment, Visuals, place
from vllm_omni.model_executor.models.lance.drawing import Drawing, plan_drawing
from vllm_omni.model_executor.models.lance.layout import (
    Grid,
    Segment,
    attention_allowed,
    positions,
    raw_positions,
)
from vllm_omni.model_executor.models.lance.pack import PackBuilder
from vllm_omni.model_executor.models.lance.prompt import (
    IM_END,
    VISION_END,
    VISION_PAD,
    VISION_START,
    Prompt,
    PromptTokens,
    build_prompt,
)
from vllm_omni.model_executor.models.lance.reading import AnswerRules, Reading
from vllm_omni.model_executor.models.lance.sampling import Guidance, TokenChoice, flow_timesteps
from vllm_omni.model_executor.models.lance.stepper import Stepper
from vllm_omni.model_executor.models.lance.transformer import (
    LanceNetwork,
    LancePositionEmbedding3D,
    timestep_features,
)
from vllm_omni.model_executor.models.lance.vae import VAE_RULES, LanceVAEConfig, LanceWanVAE
from vllm_omni.model_executor.models.lance.vision import VisionTower, decoder_grid, to_patches
from vllm_omni.model_executor.parity import Report, Scenario, read_tensors, run_scenarios
from vllm_omni.model_executor.weights import rename

_STAGE, _LATENT, _TABLE, _VAE = 2e-5, 1e-4, 1e-6, 2e-5
_BF16 = 2e-2
_WEIGHTS, _VAE_WEIGHTS = "state_dict.safetensors", "state_dict_vae.safetensors"
_SHIFT, _SCALE, _INTERVAL = 3.5, 4.0, (0.4, 1.0)
_VARIANTS = {
    "": Guidance(_SCALE, _INTERVAL, "global", 0.0),
    "cfg1": Guidance(1.0, _INTERVAL, "global", 0.0),
    "interval": Guidance(_SCALE, (0.6, 1.0), "global", 0.0),
    "channel": Guidance(_SCALE, _INTERVAL, "channel", 0.0),
    "norenorm": Guidance(_SCALE, _INTERVAL, "none", 0.0),
}
"""What the recorded variants of a task change; the recordings do not state it."""


def verify(golden_dir: Path) -> Report:
    """Run every scenario file of `golden_dir`."""
    return run_scenarios(
        "lance",
        golden_dir,
        {
            "golden_fp32.safetensors": run_fp32,
            "golden_bf16.safetensors": run_bf16,
            "golden_vae.safetensors": run_vae,
            "report_vae_vit.json": run_report,
        },
        auxiliary=("README*", ".*", "meta_*.json", _WEIGHTS, _VAE_WEIGHTS),
    )


# -- the recorded model ------------------------------------------------------------------------------------------------


class ToyModel:
    """The recorded tiny model and its vocabulary."""

    def __init__(self, directory: Path, precision: str, dtype: torch.dtype) -> None:
        meta = json.loads((directory / f"meta_{precision}.json").read_text())
        values = meta["config"]
        latent = values["latent"]
        self.packing: dict[str, Any] = meta.get("packing", {})
        self.special: dict[str, int] = values["specials"]
        self.vocabulary: dict[str, int] = {**meta["toy_vocab"], **self.special}
        self.config = LanceConfig.from_checkpoint(
            values["llm"],
            values["vit"],
            max_latent_size=latent["max_latent_size"],
            max_latent_frames=1 + (latent["max_num_frames"] - 1) // 4,
        )
        with default_dtype(dtype):
            self.network = LanceNetwork(self.config)
            self.vision = VisionTower(self.config.vision)
        weights, _ = read_tensors(directory / _WEIGHTS)
        self.table = weights.pop("latent_pos_embed.pos_embed")
        slots = checkpoint_slots(self.network) | {
            f"vit_model.{name}": slot for name, slot in checkpoint_slots(self.vision.tower).items()
        }
        if slots.keys() != weights.keys():
            raise ValueError(f"{_WEIGHTS}: names differ from the model's: {sorted(slots.keys() ^ weights.keys())[:3]}")
        for name, slot in slots.items():
            slot.load(weights[name])
        markers = (self.special[VISION_START], self.special[VISION_END])
        self.stepper = Stepper(self.network, markers, self.config.vocab_size)

    @cached_property
    def words(self) -> dict[int, str]:
        return {number: word for word, number in self.vocabulary.items()}

    def encode(self, text: str) -> list[int]:
        """Tokenise with the recorded vocabulary, the longest word first."""
        ids = []
        while text:
            word = max((word for word in self.vocabulary if text.startswith(word)), key=len, default=None)
            if word is None:
                raise ValueError(f"the recorded vocabulary has no word for {text[:20]!r}")
            ids.append(self.vocabulary[word])
            text = text[len(word) :]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.words[number] for number in ids)

    @property
    def tokens(self) -> PromptTokens:
        return PromptTokens(self.encode, self.encode)


def run_fp32(scenario: Scenario) -> None:
    model = ToyModel(scenario.directory, "fp32", torch.float32)
    compare_text(scenario, model, _Fp32(scenario))
    compare_velocity(scenario, model, _Fp32(scenario))
    compare_tables(scenario, model)
    for name in _recorded(scenario):
        task, variant = _split(name)
        inputs = TaskInputs.read(scenario, model, task)
        if not variant:
            compare_packing(scenario, model, inputs)
        _compare_task(scenario, model, inputs, variant, _Fp32(scenario))


def run_bf16(scenario: Scenario) -> None:
    """End results only; inputs come from the fp32 recording beside it."""
    inputs_file = Scenario(scenario.directory / "golden_fp32.safetensors", Report("lance", "inputs"))
    model = ToyModel(scenario.directory, "bf16", torch.bfloat16)
    judge = _Bf16(scenario, inputs_file)
    compare_text(inputs_file, model, judge)
    compare_velocity(inputs_file, model, judge)
    for name in _recorded(scenario):
        task, variant = _split(name)
        _compare_task(inputs_file, model, TaskInputs.read(inputs_file, model, task), variant, judge)


class _Fp32:
    """Compares a stage with its fp32 recording; a name that is not recorded is passed over."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def __call__(self, stage: str, ours: torch.Tensor, name: str, tolerance: float, rows: slice = slice(None)) -> None:
        if name not in self.scenario:
            return
        self.scenario.compare(stage, ours, self.scenario.get(name)[rows], tolerance)


class _Bf16:
    """Compares a stage's relative L2 distance, and tokens as far as they are decided."""

    def __init__(self, scenario: Scenario, fp32: Scenario) -> None:
        self.scenario, self.fp32 = scenario, fp32

    def __call__(self, stage: str, ours: torch.Tensor, name: str, tolerance: float, rows: slice = slice(None)) -> None:
        if name not in self.scenario:
            return
        recorded, exact = self.scenario.get(name)[rows], self.fp32.get(name)[rows]
        if not recorded.is_floating_point():
            if size := self._decided(name.replace("tokens", "logits")):
                self.scenario.compare(f"{stage} (decided)", ours[:size], recorded[:size], 0.0)
            return
        size = min(len(recorded), self._decided(name) + 1 if "x2t" in name else len(recorded))
        allowed = max(_BF16, 2.0 * _distance(recorded[:size], exact[:size]))
        distance = torch.tensor(_distance(ours[:size], recorded[:size]))
        self.scenario.compare(f"{stage} (relative L2)", distance, torch.tensor(0.0), allowed)

    def _decided(self, logits: str) -> int:
        """How many leading steps of an answer bf16 can decide."""
        chosen_by = self.fp32.get(logits)
        if logits == "a.greedy_logits":  # recorded after each token was fed: the prompt's last row chose the first
            chosen_by = torch.cat((self.fp32.get("a.logits")[-1:], chosen_by[:-1]))
        best = chosen_by.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > _BF16 * best[:, 0].abs()
        return int(clear.int().cumprod(0).sum())


def _distance(ours: torch.Tensor, recorded: torch.Tensor) -> float:
    return float((ours.double() - recorded.double()).norm() / recorded.double().norm())


def _recorded(scenario: Scenario) -> list[str]:
    prefixes = {name.split(".")[0] for name in scenario.tensors} - {"a", "b", "c"}
    return sorted(prefixes, key=lambda name: (len(name.split("_")), name))


def _split(name: str) -> tuple[Task, str]:
    for task in TASKS:
        variant = name.removeprefix(task).removeprefix("_")
        if name.startswith(task) and variant in _VARIANTS:
            return task, variant
    raise ValueError(f"{name!r} is no task of this model")


# -- decoder -----------------------------------------------------------------------------------------------------------


def compare_text(scenario: Scenario, model: ToyModel, judge: "_Fp32 | _Bf16") -> None:
    """A text prefill layer by layer, its keys and values, its logits, and greedy decoding behind it."""
    if "a.input_ids" not in scenario:
        return
    ids = scenario.get("a.input_ids").tolist()
    context = [PlacedSegment(Segment("text", ids=tuple(ids)), scenario.get("a.position_ids")[:, 0])]
    decoder = model.network.language_model
    cache = decoder.new_cache(len(ids))
    builder = PackBuilder()
    model.stepper.writer.add(builder, cache, context, Visuals())
    pack = builder.build()
    for layer in range(model.config.num_layers):
        judge("text: layers", decoder.hidden_states(pack, layer + 1)["und"], f"a.layer{layer}_out", _STAGE)
        judge("text: keys", cache.k[layer], f"a.k{layer}", _STAGE)
        judge("text: values", cache.v[layer], f"a.v{layer}", _STAGE)
    hidden = decoder(pack)["und"]
    judge("text: final hidden", hidden, "a.hidden_final", _STAGE)
    judge("text: logits", decoder.logits(hidden, model.config.vocab_size), "a.logits", _STAGE)
    if "a.greedy_tokens" not in scenario:
        return
    steps = len(scenario.get("a.greedy_tokens"))
    tokens, logits = _greedy(model, context, Visuals(), steps + 1, end_token=-1)
    judge("text: greedy tokens", tokens[:steps], "a.greedy_tokens", 0.0)
    judge("text: greedy logits", logits[1:], "a.greedy_logits", _STAGE)  # recorded after each token was fed


def _greedy(
    model: ToyModel, context: Sequence[PlacedSegment], visuals: Visuals, steps: int, end_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode greedily, one token a step; returns (tokens, logits of each)."""
    capacity = sum(placed.segment.length for placed in context) + steps
    reading = Reading(
        cache=model.network.language_model.new_cache(capacity),
        rules=AnswerRules(TokenChoice(0.0, 1.0), seed=0, max_tokens=steps, end_token=end_token),
        chunk_tokens=steps,
        context=context,
        visuals=visuals,
    )
    logits = []
    while not reading.done:
        model.stepper.step([], [reading])
        reading.settle(lambda ids: "")
        assert reading.logits is not None
        logits.append(reading.logits)
    return torch.tensor(reading.progress.tokens), torch.stack(logits)


def compare_velocity(scenario: Scenario, model: ToyModel, judge: "_Fp32 | _Bf16") -> None:
    """One velocity behind a short context, stage by stage; the context must not grow."""
    if "b.x_t" not in scenario:
        return
    network, writer = model.network, model.stepper.writer
    ids = scenario.get("b.ctx_ids").tolist()
    where = scenario.get("b.query_position_ids")[:, 0]
    flat = scenario.get("b.latent_pos_ids")
    x_t, t = scenario.get("b.x_t"), scenario.get("b.timestep")
    cache = network.language_model.new_cache(len(ids) + len(x_t) + 2)
    builder = PackBuilder()
    context = [PlacedSegment(Segment("text", ids=tuple(ids)), scenario.get("b.ctx_position_ids")[:, 0])]
    writer.add(builder, cache, context, Visuals())
    network.language_model(builder.build())

    size = model.config.max_latent_size
    table = network.latent_pos_embed.rows(model.config.max_latent_frames, size, size)
    rows = table[flat].to(network.language_model.dtype)
    time = network.time_embedder(t)
    judge("velocity: time", time, "b.time_embed", _STAGE)
    judge("velocity: latent positions", rows, "b.latent_pos_embed", _TABLE)
    embeds = network.embed_latents(x_t, time, rows)
    judge("velocity: latent tokens", embeds, "b.vae_embed", _STAGE)
    markers = writer.markers()
    judge("velocity: block", torch.cat((markers[:1], embeds, markers[1:])), "b.query_sequence", _STAGE)
    builder = PackBuilder()
    writer.add_block(builder, cache, embeds, writer.block_rope(where))
    pack = builder.build()
    for layer in range(model.config.num_layers):
        judge(
            "velocity: layers",
            _in_order(network.language_model.hidden_states(pack, layer + 1)),
            f"b.layer{layer}_out",
            _STAGE,
        )
    hidden = network.language_model(pack)
    judge("velocity: final hidden", _in_order(hidden), "b.hidden_final", _STAGE)
    judge("velocity: velocity", network.velocity(hidden["gen"]), "b.velocity", _STAGE)
    if cache.length != len(ids):
        raise ValueError(f"the context grew from {len(ids)} to {cache.length} slots")


def _in_order(hidden: Any) -> torch.Tensor:
    """One block's rows as the original orders them: start, cells, end."""
    return torch.cat((hidden["und"][:1], hidden["gen"], hidden["und"][1:]))


def compare_tables(scenario: Scenario, model: ToyModel) -> None:
    """Position table, its index rule, timestep features, schedules."""
    config, judge = model.config, _Fp32(scenario)
    size = config.max_latent_size
    tiny = model.network.latent_pos_embed.rows(config.max_latent_frames, size, size)
    scenario.compare("tables: positions", tiny, model.table, _TABLE)
    for name in [name for name in scenario.tensors if name.startswith("c.")]:
        recorded = scenario.get(name)
        label = name.removeprefix("c.")
        if label.startswith("tiny_table"):
            judge("tables: positions", tiny, name, _TABLE)
        elif label == "real_3d":
            real = LancePositionEmbedding3D(recorded.shape[1], 31, 64)
            rows = scenario.get("c.real_rows")
            ours = torch.cat([_row(real, int(row)) for row in rows])
            scenario.compare("tables: positions, real size", ours, recorded, _TABLE)
        elif label == "real_2d_bagel":
            if float((recorded - scenario.get("c.real_3d")).abs().max()) < 0.1:
                raise ValueError("the ancestor's 2-D table is recorded equal to the 3-D one")
        elif label.startswith("flat_ids"):
            frames, height, width, side = (int(part[1:]) for part in label.split("_")[2:])
            ours = LancePositionEmbedding3D(64, frames, side).flat_ids(frames, height, width)
            scenario.compare("tables: indices", ours, recorded, 0.0)
        elif label.startswith("schedule"):
            steps, shift = label.removeprefix("schedule_n").split("_s")
            scenario.compare("tables: schedule", flow_timesteps(int(steps), float(shift)), recorded, _TABLE)
        elif label.startswith("timestep_freq"):
            ours = timestep_features(scenario.get("c.timestep_in"))
            scenario.compare("tables: timestep features", ours, recorded, _TABLE)
        elif label not in ("real_rows", "timestep_in"):
            raise ValueError(f"{name} is not understood")


def _row(table: LancePositionEmbedding3D, index: int) -> torch.Tensor:
    t, rest = divmod(index, table.size * table.size)
    return table.rows(t + 1, rest // table.size + 1, rest % table.size + 1)[-1:]


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskInputs:
    """A recorded task: its prompt rebuilt from text, and what fills its blocks."""

    task: Task
    prompt: Prompt
    vit_grid: Grid | None
    reference: torch.Tensor | None
    noise: torch.Tensor | None
    first_frame: torch.Tensor | None
    visuals: Visuals

    @classmethod
    def read(cls, scenario: Scenario, model: ToyModel, task: Task) -> "TaskInputs":
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
        visuals = Visuals(rows, None if reference is None else reference.flatten(0, 2))
        return cls(task, prompt, vit_grid, reference, noise, first_frame, visuals)


def _texts(scenario: Scenario, model: ToyModel, task: Task, ids: list[int]) -> tuple[str, str | None]:
    """Return what the user wrote and, for reading tasks (whose system prompt is the request's), the system prompt."""
    if task not in READING_TASKS:
        modality = scenario.get(f"{task}.sample_modality").tolist()
        return model.text([number for number, kind in zip(ids, modality, strict=True) if kind == 0]), None
    end = model.special[IM_END]
    vision_end = len(ids) - 1 - ids[::-1].index(model.special[VISION_END])
    user = ids[vision_end + 1 : ids.index(end, vision_end)]
    return model.text(user), model.text(ids[3 : ids.index(end)])


def compare_packing(scenario: Scenario, model: ToyModel, inputs: TaskInputs) -> None:
    """Token ids, modalities, split lengths and modes, positions, masks: exactly."""
    task = inputs.task

    def equal(stage: str, ours: Any, name: str, size: int | None = None) -> None:
        if name in scenario:
            recorded = scenario.get(name)
            recorded = recorded if size is None else recorded[..., :size]
            scenario.compare(f"{task}: {stage}", torch.as_tensor(ours).reshape(recorded.shape), recorded, 0.0)

    reading = task in READING_TASKS
    closing = Segment("text", ids=(model.special[IM_END],))
    cond = [*inputs.prompt.cond] if reading else [*inputs.prompt.cond, closing]
    ids = [number for segment in cond for number in _ids(segment, model)]
    if reading:
        equal("ids", ids, f"{task}.prompt_ids")
        equal("ids", ids, f"{task}.packed_text_ids", len(ids))
        equal("splits", [segment.length for segment in cond[:2]], f"{task}.split_lens", 2)
        if f"{task}.ce_loss_indexes" in scenario:
            answer = len(ids) - 1 + torch.arange(len(scenario.get(f"{task}.ce_loss_indexes")))
            equal("answer's place", answer, f"{task}.ce_loss_indexes")
        if f"{task}.mrope" in scenario:
            where = torch.cat(positions(cond), dim=1)
            behind = scenario.get(f"{task}.mrope").shape[2] - len(ids)
            following = int(where[0, -1]) + 1 + torch.arange(behind).expand(3, -1)
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
            raise ValueError(f"{task}: attention modes are {modes}, recorded {packing['attn_modes']}")
    blocks = [segment for segment in cond if segment.kind in ("reference", "noise")]
    equal("grids", _grids(inputs, blocks), f"{task}.video_grid_thw")
    sizes = [(1 + 4 * (block.grid[0] - 1), 16 * block.grid[1], 16 * block.grid[2]) for block in blocks]
    equal("sizes", sizes, f"{task}.video_sizes")
    if inputs.first_frame is not None:
        start = sum(segment.length for segment in cond[:-2]) + 1
        free = torch.arange(start + len(inputs.first_frame), start + cond[-2].num_cells)
        equal("free tokens", free, f"{task}.mse_loss_indexes")
    if inputs.visuals.vit is not None:
        judge = _Fp32(scenario)
        judge(f"{task}: vision tower", inputs.visuals.vit, f"{task}.vit_embed", _STAGE)
        if f"{task}.vit_video_cthw" in scenario:
            patches, _ = to_patches(scenario.get(f"{task}.vit_video_cthw"))
            judge(f"{task}: patches", patches, f"{task}.vit_pixels", 0.0)


def _ids(segment: Segment, model: ToyModel) -> list[int]:
    if segment.kind == "text":
        return list(segment.ids)
    pad = model.special[VISION_PAD]
    return [model.special[VISION_START], *([pad] * segment.num_cells), model.special[VISION_END]]


def _grids(inputs: TaskInputs, blocks: Sequence[Segment]) -> list[Grid]:
    """The original's grids: vision in patches, latents with both sides doubled."""
    vision = [] if inputs.vit_grid is None else [(inputs.vit_grid[0], 2 * inputs.vit_grid[1], 2 * inputs.vit_grid[2])]
    return [*vision, *((block.grid[0], 2 * block.grid[1], 2 * block.grid[2]) for block in blocks)]


def _compare_task(
    scenario: Scenario, model: ToyModel, inputs: TaskInputs, variant: str, judge: "_Fp32 | _Bf16"
) -> None:
    if inputs.task in READING_TASKS:
        _compare_answer(scenario, model, inputs, judge)
        return
    name = inputs.task if not variant else f"{inputs.task}_{variant}"
    for path in ("kv", "nokv"):
        if f"{name}.{path}.latent" in judge.scenario:
            _compare_drawing(scenario, model, inputs, variant, f"{name}.{path}", judge)


def _compare_drawing(
    scenario: Scenario, model: ToyModel, inputs: TaskInputs, variant: str, recorded: str, judge: "_Fp32 | _Bf16"
) -> None:
    """Sample with the recorded noise. The full-sequence path equals ours with positions of their own."""
    cached = recorded.endswith(".kv")
    steps = _num_steps(scenario, inputs.task)
    plan = plan_drawing(inputs.prompt, "cond" if cached else "own")
    sizes = plan.capacities()
    guidance = _VARIANTS[variant]
    decoder = model.network.language_model
    assert inputs.noise is not None
    latents = inputs.noise.float().clone()
    pinned = 0
    if inputs.first_frame is not None:
        pinned = len(inputs.first_frame)
        latents[:pinned] = inputs.first_frame
    drawing = Drawing(
        plan=plan,
        visuals=inputs.visuals,
        guidance=guidance,
        timesteps=flow_timesteps(steps, _SHIFT),
        latents=latents[None],
        cond=[decoder.new_cache(sizes[0])],
        uncond=[decoder.new_cache(sizes[1])] if guidance.enabled else [],
        pinned=pinned,
        renorm_pinned=cached,
    )
    model.stepper.step([drawing], [])
    drawing.advance()
    label, forward = recorded.rpartition(".")[0], 0
    tail, cells = slice(-plan.num_latents, None), slice(1, -1)
    context = [cache.length for cache in (*drawing.cond, *drawing.uncond)]
    for step in range(steps):
        judge(f"{label}: noisy latents", drawing.latents[0], f"{recorded}.x_t{step}", _STAGE, tail)
        model.stepper.step([drawing], [])
        assert drawing.prediction is not None
        for velocity in drawing.prediction[:, 0]:
            judge(f"{label}: velocity", velocity, f"{recorded}.llm2vae{forward}", _STAGE, cells)
            forward += 1
        drawing.advance()
    if context != [cache.length for cache in (*drawing.cond, *drawing.uncond)]:
        raise ValueError(f"{recorded}: a denoise step moved the end of a context")
    final = drawing.latents[0].view(*plan.grid, -1)
    judge(f"{label}: final latents ({recorded.rpartition('.')[2]})", final, f"{recorded}.latent", _LATENT)


def _num_steps(scenario: Scenario, task: Task) -> int:
    """Return how many steps a task was sampled with: one recorded `x_t` each, on either path."""
    steps = max(sum(name.startswith(f"{task}.{path}.x_t") for name in scenario.tensors) for path in ("kv", "nokv"))
    if steps == 0:
        raise ValueError(f"{task} has no x_t: the number of its steps is unknown")
    return steps


def _compare_answer(scenario: Scenario, model: ToyModel, inputs: TaskInputs, judge: "_Fp32 | _Bf16") -> None:
    context = place(inputs.prompt.cond, positions(inputs.prompt.cond))
    for path in ("kv", "nokv"):
        name = f"{inputs.task}.{path}"
        if f"{name}.tokens" not in judge.scenario:
            continue
        steps = len(judge.scenario.get(f"{name}.tokens"))
        tokens, logits = _greedy(model, context, inputs.visuals, steps, model.special[IM_END])
        judge(f"{inputs.task}: tokens ({path})", tokens, f"{name}.tokens", 0.0)
        judge(f"{inputs.task}: logits ({path})", logits, f"{name}.logits", _STAGE)


# -- autoencoder -------------------------------------------------------------------------------------------------------


def run_vae(scenario: Scenario) -> None:
    """Encode and decode the recorded clips."""
    weights, _ = read_tensors(scenario.directory / _VAE_WEIGHTS)
    vae = LanceWanVAE(
        LanceVAEConfig(
            base_dim=weights["encoder.conv1.weight"].shape[0],
            decoder_base_dim=weights["decoder.conv1.weight"].shape[0] // 4,
            z_dim=weights["conv2.weight"].shape[0],
            latents_mean=tuple(scenario.get("vae.mean").tolist()),
            latents_std=tuple(scenario.get("vae.std").tolist()),
        )
    )
    slots = checkpoint_slots(vae.vae)
    renamed = {rename(name, VAE_RULES): tensor for name, tensor in weights.items()}
    if slots.keys() != renamed.keys():
        raise ValueError(f"{_VAE_WEIGHTS}: names differ from the model's: {sorted(slots.keys() ^ renamed.keys())[:3]}")
    for name, slot in slots.items():
        slot.load(renamed[name])
    judge = _Fp32(scenario)
    for clip in sorted({name.rpartition(".")[0] for name in scenario.tensors if name.endswith(".x")}):
        mean, log_var = vae.posterior(scenario.get(f"{clip}.x"))
        judge("encode: mean", mean, f"{clip}.mu_norm", _VAE)
        judge("encode: log-variance", log_var, f"{clip}.logvar", _VAE)
        # Recorded before the clamp to [-1, 1], which is part of our decoder.
        expected = scenario.get(f"{clip}.dec").clamp(-1.0, 1.0)
        scenario.compare("decode", vae.decode_video(scenario.get(f"{clip}.z")), expected, _VAE)


def run_report(scenario: Scenario) -> None:
    """The real checkpoint's VAE names and shapes against ours at full size, and the recorded equivalence numbers."""
    recorded = json.loads(scenario.path.read_text())
    with torch.device("meta"):
        slots = checkpoint_slots(LanceWanVAE(LanceVAEConfig()).vae)
    real = {rename(name, VAE_RULES): tuple(shape) for name, shape in recorded["real_keys"].items()}
    wrong = [
        name for name in real.keys() | slots.keys() if real.get(name) != (slots[name].shape if name in slots else None)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} VAE tensors differ in name or shape: {sorted(wrong)[:3]}")
    scenario.compare(
        "VAE tensors, real size", torch.tensor(len(slots)), torch.tensor(recorded["real_vae"]["n_tensors"]), 0.0
    )
    elements = sum(torch.Size(slot.shape).numel() for slot in slots.values())
    scenario.compare(
        "VAE elements, real size", torch.tensor(elements), torch.tensor(recorded["real_vae"]["n_params"]), 0.0
    )
    for name, value in recorded.items():
        numbers = value.items() if isinstance(value, dict) else [(name, value)]
        for key, number in numbers:
            if "maxabs" in key:
                scenario.compare("recorded equivalences", torch.tensor(float(number)), torch.tensor(0.0), _VAE)
