# SPDX-License-Identifier: Apache-2.0
"""Run one engine step for a mixed batch of generation and understanding requests (`BatchStepper`).

    pass 1    contexts of new generations and blocks of running generations; prompts of new
              understanding requests and tokens of running ones
    pass 2    the parts of new unconditional contexts that differ from the conditional context, if
              these contexts share a reference
    pass 3..  more tokens of understanding requests, if a step decodes several tokens

Each matrix product in a forward pass processes the tokens of all requests. If a batch contains only
running generations, its steps differ only in their input values, so a step can be replayed as a
CUDA graph. So can the first step of new generations without a reference, because their contexts are
padded. Later requests that use the same caches reuse the graphs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.layers.lora.active import addresses_key
from vllm_omni.model_executor.models.lance.network.pack import Expert, PackBuilder
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.tasks.context import ContextWriter
from vllm_omni.model_executor.models.lance.tasks.generation import ImageGeneration
from vllm_omni.model_executor.models.lance.tasks.understanding import UnderstandingChunk


class BatchStepper:
    """Runs the engine steps of a mixed batch.

    Args:
        network: The decoder and the latent projections.
        markers: Ids of the start and end tokens of a visual block.
        num_tokens: Number of tokens in the tokenizer's vocabulary. Logits beyond this number do not
            correspond to any token.
        graphs: CUDA graphs for denoise steps and for writing contexts. None: kernels are launched
            one by one.
    """

    def __init__(
        self,
        network: LanceNetwork,
        markers: tuple[int, int],
        num_tokens: int,
        graphs: ForwardGraphs | None = None,
    ) -> None:
        self.network = network
        self.writer = ContextWriter(network, markers)
        self.num_tokens = num_tokens
        self.graphs = graphs

    def step(
        self,
        generations: Sequence[ImageGeneration],
        understandings: Sequence[UnderstandingChunk],
        tokens_per_step: int = 1,
    ) -> None:
        """For each generation, compute the velocities or write the contexts. For each understanding
        request, decode up to `tokens_per_step` tokens.

        Only `ImageGeneration.advance` and `UnderstandingChunk.settle` change the inputs of later
        steps, so the step can be repeated after an exception.
        """
        for understanding in understandings:
            understanding.start_step()
        builder = PackBuilder()
        generations = [generation for generation in generations if generation.computes]
        fresh = [generation for generation in generations if not generation.prefilled]
        for generation in generations:
            if generation.prefilled:
                generation.add_step(self.writer, builder)
            else:
                generation.prepare_steps(self.writer)
                generation.add_context(self.writer, builder)
        for understanding in understandings:
            understanding.add_tokens(self.writer, builder)
        if builder.empty:  # no request needs a forward pass in this step
            return
        replayable = not understandings and (
            not fresh
            or (
                len(fresh) == len(generations)
                and not any(generation.plan.has_reference for generation in fresh)
            )
        )
        hidden = (
            self._replay(builder, "und" if fresh else "gen") if replayable else self._run(builder)
        )
        self._choose(understandings, hidden)
        if len(fresh) < len(generations):
            velocity = self.network.velocity(hidden["gen"])
            for generation in generations:
                if generation.prefilled:
                    generation.take_velocity(velocity)
        if fresh:
            builder = PackBuilder()
            for generation in fresh:
                generation.add_rest_of_uncond(self.writer, builder)
            if not builder.empty:
                self._run(builder)
            for generation in fresh:
                generation.share_contexts()
        for _ in range(tokens_per_step - 1):
            going_on = [
                understanding for understanding in understandings if understanding.wanted > 0
            ]
            if not going_on:
                break
            builder = PackBuilder()
            for understanding in going_on:
                understanding.add_tokens(self.writer, builder)
            self._choose(going_on, self._run(builder))

    def _choose(
        self, understandings: Sequence[UnderstandingChunk], hidden: dict[Expert, torch.Tensor]
    ) -> None:
        if not understandings:
            return
        rows = torch.stack([hidden["und"][understanding.row] for understanding in understandings])
        logits = self.network.language_model.logits(rows, self.num_tokens)
        for understanding, row in zip(understandings, logits, strict=True):
            understanding.choose(row)

    def _replay(self, builder: PackBuilder, result: Expert) -> dict[Expert, torch.Tensor]:
        """Run a forward pass that differs from other passes with the same key only in its input
        values, as a CUDA graph if there are graphs. The hidden states of the expert `result` are
        returned.
        """
        if self.graphs is None:
            return self._run(builder)
        pack = builder.build()
        experts = list(pack.embeds)
        inputs: Inputs = {f"{expert} embeds": pack.embeds[expert] for expert in experts}
        for expert in experts:
            inputs[f"{expert} cos"], inputs[f"{expert} sin"] = pack.rope[expert]
        ranges = list(pack.seen.values())
        if ranges:
            inputs["seen"] = torch.stack(ranges)

        def forward(own: Inputs) -> torch.Tensor:
            embeds = {expert: own[f"{expert} embeds"] for expert in experts}
            rope = {expert: (own[f"{expert} cos"], own[f"{expert} sin"]) for expert in experts}
            seen = dict(zip(pack.seen, own["seen"].unbind(), strict=True)) if ranges else {}
            rows: torch.Tensor = self.network.language_model(
                replace(pack, embeds=embeds, rope=rope, seen=seen)
            )[result]
            return rows

        written = [tensor for cache in pack.caches for tensor in (cache.k, cache.v)]
        kernels = pack.key, addresses_key(), tuple(cache.sizes for cache in pack.caches)
        return {result: self.graphs(kernels, inputs, forward, buffers=written, kind=kernels)}

    def _run(self, builder: PackBuilder) -> dict[Expert, torch.Tensor]:
        result: dict[Expert, torch.Tensor] = self.network.language_model(builder.build())
        return result
