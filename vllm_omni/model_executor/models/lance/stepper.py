# SPDX-License-Identifier: Apache-2.0
"""`Stepper`: one engine step of a mixed batch of image generation and understanding requests.

    pass 1    contexts of new generations, blocks of running ones; prompts of new understanding
    requests, tokens of others
    pass 2    the separate part of new unconditional contexts
    pass 3..  further tokens of understanding requests, if a step decodes several

Every matrix product of a pass serves all requests. A step with only running generations differs
between denoise steps only in its inputs. It can be a CUDA graph, which later requests with the same
caches reuse.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.lora.active import addresses_key
from vllm_omni.model_executor.models.lance.context import ContextWriter
from vllm_omni.model_executor.models.lance.drawing import Drawing
from vllm_omni.model_executor.models.lance.pack import Expert, Pack, PackBuilder
from vllm_omni.model_executor.models.lance.reading import Reading
from vllm_omni.model_executor.models.lance.transformer import LanceNetwork


class Stepper:
    """markers: ids of a visual block's start and end. num_tokens: logits beyond belong to no token of the tokenizer.

    graphs: of denoise steps; None = they are launched kernel by kernel.
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

    def step(self, drawings: Sequence[Drawing], readings: Sequence[Reading], tokens_per_step: int = 1) -> None:
        """Compute the velocities (or context) of every generation, and up to `tokens_per_step`
        tokens of each understanding request.

        No state changes before `Drawing.advance` and `Reading.settle`, so the step can be run again
        after an exception.
        """
        for reading in readings:
            reading.begin()
        builder = PackBuilder()
        drawings = [drawing for drawing in drawings if drawing.computes]
        fresh = [drawing for drawing in drawings if not drawing.prefilled]
        for drawing in drawings:
            if drawing.prefilled:
                drawing.add_step(self.writer, builder)
            else:
                drawing.add_context(self.writer, builder)
        for reading in readings:
            reading.add(self.writer, builder)
        if builder.empty:  # no step of this one needs the network
            return
        hidden: dict[Expert, torch.Tensor]
        hidden = self._run(builder) if fresh or readings else {"gen": self._denoise(builder.build())}
        self._choose(readings, hidden)
        if len(fresh) < len(drawings):
            velocity = self.network.velocity(hidden["gen"])
            for drawing in drawings:
                if drawing.prefilled:
                    drawing.take(velocity)
        if fresh:
            builder = PackBuilder()
            for drawing in fresh:
                drawing.add_uncond_context(self.writer, builder)
            if not builder.empty:
                self._run(builder)
            for drawing in fresh:
                drawing.finish_context(self.writer)
        for _ in range(tokens_per_step - 1):
            going_on = [reading for reading in readings if reading.wanted > 0]
            if not going_on:
                break
            builder = PackBuilder()
            for reading in going_on:
                reading.add(self.writer, builder)
            self._choose(going_on, self._run(builder))

    def _choose(self, readings: Sequence[Reading], hidden: dict[Expert, torch.Tensor]) -> None:
        if not readings:
            return
        rows = torch.stack([hidden["und"][reading.row] for reading in readings])
        logits = self.network.language_model.logits(rows, self.num_tokens)
        for reading, row in zip(readings, logits, strict=True):
            reading.choose(row)

    def _denoise(self, pack: Pack) -> torch.Tensor:
        """Run a pack of running drawings; returns the rows of their latents."""
        if self.graphs is None:
            return self._latent_rows(pack)
        experts = list(pack.embeds)
        inputs: Inputs = {f"{expert} embeds": pack.embeds[expert] for expert in experts}
        for expert in experts:
            inputs[f"{expert} cos"], inputs[f"{expert} sin"] = pack.rope[expert]
        inputs["seen"] = torch.stack([pack.seen[cache] for cache in pack.caches])

        def forward(own: Inputs) -> torch.Tensor:
            embeds = {expert: own[f"{expert} embeds"] for expert in experts}
            rope = {expert: (own[f"{expert} cos"], own[f"{expert} sin"]) for expert in experts}
            seen = dict(zip(pack.caches, own["seen"].unbind(), strict=True))
            return self._latent_rows(replace(pack, embeds=embeds, rope=rope, seen=seen))

        written = [tensor for cache in pack.caches for tensor in (cache.k, cache.v)]
        kernels = pack.key, addresses_key(), tuple(cache.sizes for cache in pack.caches)
        return self.graphs(kernels, inputs, forward, places=written, kind=kernels)

    def _latent_rows(self, pack: Pack) -> torch.Tensor:
        rows: torch.Tensor = self.network.language_model(pack)["gen"]
        return rows

    def _run(self, builder: PackBuilder) -> dict[Expert, torch.Tensor]:
        result: dict[Expert, torch.Tensor] = self.network.language_model(builder.build())
        return result
