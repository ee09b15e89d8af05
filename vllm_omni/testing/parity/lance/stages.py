# SPDX-License-Identifier: Apache-2.0
"""Compares Lance's decoder, latent embedding and tables with recordings."""

from typing import Any

import torch

from vllm_omni.model_executor.models.lance.network.pack import PackBuilder
from vllm_omni.model_executor.models.lance.network.transformer import (
    LancePositionEmbedding3D,
    timestep_features,
)
from vllm_omni.model_executor.models.lance.tasks.context import ContextSegment, VisualContents
from vllm_omni.model_executor.models.lance.tasks.sampling import flow_timesteps
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import SequenceSegment
from vllm_omni.testing.parity.comparison import GoldenScenario
from vllm_omni.testing.parity.lance.recorded import STAGE, TABLE, Fp32Judge, Judge, ToyModel, greedy


def compare_text(scenario: GoldenScenario, model: ToyModel, judge: Judge) -> None:
    """Compare the prefill of a text (layers, K/V and logits) and the greedy decoding that follows
    with the recording.
    """
    if "a.input_ids" not in scenario:
        return
    ids = scenario.get("a.input_ids").tolist()
    context = [
        ContextSegment(
            SequenceSegment("text", ids=tuple(ids)), scenario.get("a.position_ids")[:, 0]
        )
    ]
    decoder = model.network.language_model
    cache = decoder.new_cache(len(ids))
    builder = PackBuilder()
    model.stepper.writer.append_segments(builder, cache, context, VisualContents())
    pack = builder.build()
    for layer in range(model.config.num_layers):
        judge(
            "text: layers",
            decoder.hidden_states(pack, layer + 1)["und"],
            f"a.layer{layer}_out",
            STAGE,
        )
        judge("text: keys", cache.k[layer], f"a.k{layer}", STAGE)
        judge("text: values", cache.v[layer], f"a.v{layer}", STAGE)
    hidden = decoder(pack)["und"]
    judge("text: final hidden", hidden, "a.hidden_final", STAGE)
    judge("text: logits", decoder.logits(hidden, model.config.vocab_size), "a.logits", STAGE)
    if "a.greedy_tokens" not in scenario:
        return
    steps = len(scenario.get("a.greedy_tokens"))
    tokens, logits = greedy(model, context, VisualContents(), steps + 1, end_token=-1)
    judge("text: greedy tokens", tokens[:steps], "a.greedy_tokens", 0.0)
    # These logits were recorded after each token was fed to the model.
    judge("text: greedy logits", logits[1:], "a.greedy_logits", STAGE)


def compare_velocity(scenario: GoldenScenario, model: ToyModel, judge: Judge) -> None:
    """Compare one velocity prediction after a short context with the recording, stage by stage. The
    prediction must not make the context longer.
    """
    if "b.x_t" not in scenario:
        return
    network, writer = model.network, model.stepper.writer
    ids = scenario.get("b.ctx_ids").tolist()
    where = scenario.get("b.query_position_ids")[:, 0]
    flat = scenario.get("b.latent_pos_ids")
    x_t, t = scenario.get("b.x_t"), scenario.get("b.timestep")
    cache = network.language_model.new_cache(len(ids), len(x_t) + 2)
    builder = PackBuilder()
    context = [
        ContextSegment(
            SequenceSegment("text", ids=tuple(ids)), scenario.get("b.ctx_position_ids")[:, 0]
        )
    ]
    writer.append_segments(builder, cache, context, VisualContents())
    network.language_model(builder.build())

    size = model.config.max_latent_size
    table = network.latent_pos_embed.rows(model.config.max_latent_frames, size, size)
    rows = table[flat].to(network.language_model.dtype)
    time = network.time_embedder(t)
    judge("velocity: time", time, "b.time_embed", STAGE)
    judge("velocity: latent positions", rows, "b.latent_pos_embed", TABLE)
    embeds = network.embed_latents(x_t, time, rows)
    judge("velocity: latent tokens", embeds, "b.vae_embed", STAGE)
    markers = writer.markers()
    judge(
        "velocity: block", torch.cat((markers[:1], embeds, markers[1:])), "b.query_sequence", STAGE
    )
    builder = PackBuilder()
    writer.add_block(builder, cache, embeds, writer.block_rope(where), writer.seen(cache.end))
    pack = builder.build()
    for layer in range(model.config.num_layers):
        judge(
            "velocity: layers",
            _in_order(network.language_model.hidden_states(pack, layer + 1)),
            f"b.layer{layer}_out",
            STAGE,
        )
    hidden = network.language_model(pack)
    judge("velocity: final hidden", _in_order(hidden), "b.hidden_final", STAGE)
    judge("velocity: velocity", network.velocity(hidden["gen"]), "b.velocity", STAGE)
    if cache.length != len(ids):
        raise ValueError(f"the context grew from {len(ids)} to {cache.length} slots")


def _in_order(hidden: Any) -> torch.Tensor:
    """Return the hidden states of a block in the order of the original: start token, cells, end
    token.
    """
    return torch.cat((hidden["und"][:1], hidden["gen"], hidden["und"][1:]))


def compare_tables(scenario: GoldenScenario, model: ToyModel) -> None:
    """Compare the position table and its indices, the timestep features and the schedules with the
    recorded ones.
    """
    config, judge = model.config, Fp32Judge(scenario)
    size = config.max_latent_size
    tiny = model.network.latent_pos_embed.rows(config.max_latent_frames, size, size)
    scenario.compare("tables: positions", tiny, model.table, TABLE)
    for name in [name for name in scenario.tensors if name.startswith("c.")]:
        recorded = scenario.get(name)
        label = name.removeprefix("c.")
        if label.startswith("tiny_table"):
            judge("tables: positions", tiny, name, TABLE)
        elif label == "real_3d":
            real = LancePositionEmbedding3D(recorded.shape[1], 31, 64)
            rows = scenario.get("c.real_rows")
            ours = torch.cat([_row(real, int(row)) for row in rows])
            scenario.compare("tables: positions, real size", ours, recorded, TABLE)
        elif label == "real_2d_bagel":
            if float((recorded - scenario.get("c.real_3d")).abs().max()) < 0.1:
                raise ValueError("the ancestor's 2-D table is recorded equal to the 3-D one")
        elif label.startswith("flat_ids"):
            frames, height, width, side = (int(part[1:]) for part in label.split("_")[2:])
            ours = LancePositionEmbedding3D(64, frames, side).flat_ids(frames, height, width)
            scenario.compare("tables: indices", ours, recorded, 0.0)
        elif label.startswith("schedule"):
            steps, shift = label.removeprefix("schedule_n").split("_s")
            scenario.compare(
                "tables: schedule", flow_timesteps(int(steps), float(shift)), recorded, TABLE
            )
        elif label.startswith("timestep_freq"):
            ours = timestep_features(scenario.get("c.timestep_in"))
            scenario.compare("tables: timestep features", ours, recorded, TABLE)
        elif label not in ("real_rows", "timestep_in"):
            raise ValueError(f"{name} is unknown")


def _row(table: LancePositionEmbedding3D, index: int) -> torch.Tensor:
    t, rest = divmod(index, table.size * table.size)
    return table.rows(t + 1, rest // table.size + 1, rest % table.size + 1)[-1:]
