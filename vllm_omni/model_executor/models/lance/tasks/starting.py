# SPDX-License-Identifier: Apache-2.0
"""Create the `ImageGeneration` or `UnderstandingChunk` for a validated request.

Starting a request means encoding its references, assigning positions, sampling noise and allocating
caches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_omni.model_executor.device_async import StageTimer
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.lance.config import EDIT_TASKS, LanceOptions
from vllm_omni.model_executor.models.lance.media import SizePreset, for_vae, for_vit
from vllm_omni.model_executor.models.lance.network.pack import BranchCache
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.network.vae import LanceWanVAE, to_tokens
from vllm_omni.model_executor.models.lance.network.vision import (
    VisionTower,
    decoder_grid,
    to_patches,
)
from vllm_omni.model_executor.models.lance.request import GenerationInputs, UnderstandingInputs
from vllm_omni.model_executor.models.lance.state import TextReply
from vllm_omni.model_executor.models.lance.tasks.context import VisualContents, position_segments
from vllm_omni.model_executor.models.lance.tasks.generation import ImageGeneration, plan_generation
from vllm_omni.model_executor.models.lance.tasks.prompt import IM_END, LanceTokenizer, build_prompt
from vllm_omni.model_executor.models.lance.tasks.sampling import flow_timesteps
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import Grid, positions
from vllm_omni.model_executor.models.lance.tasks.understanding import TextRules, UnderstandingChunk
from vllm_omni.model_executor.schedules import noise_seed, standard_normal
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import nth_seed


@dataclass(frozen=True)
class RequestStarter:
    """Starts requests before their first engine step, using the components of `Lance`."""

    tokenizer: LanceTokenizer
    """The checkpoint's tokenizer."""
    vision: VisionTower
    """Vision tower that encodes images and clips for the decoder."""
    vae: LanceWanVAE
    """Autoencoder that encodes references."""
    network: LanceNetwork
    """Decoder with both experts, and the latent projections."""
    options: LanceOptions
    """Serving options."""

    @property
    def device(self) -> torch.device:
        return self.network.language_model.device

    def start_generation(
        self,
        inputs: GenerationInputs,
        reserved_bytes: int,
        timer: StageTimer,
        new_cache: Callable[[int, int], BranchCache],
    ) -> ImageGeneration:
        """Start an image or video generation.

        Args:
            inputs: The validated request.
            reserved_bytes: Number of bytes reserved for the request's session.
            timer: Timer of the request's stages.
            new_cache: Function that creates an empty cache, given a context capacity and a block
                size.

        Raises:
            RequestFailed: The caches would exceed `reserved_bytes` (`capacity`).
        """
        reads_source = inputs.task in EDIT_TASKS
        rows = vit = encoded = None
        if inputs.source is not None:
            source = inputs.source.to(self.device)
            if reads_source:
                rows, vit = self._see(source, inputs.preset, timer)
            with timer.stage("reference"):
                encoded = to_tokens(self._encode(for_vae(source, inputs.size), inputs.seed))
        visuals, first = (
            (VisualContents(rows, encoded), None) if reads_source else (VisualContents(), encoded)
        )
        prompt = build_prompt(
            inputs.task,
            self.tokenizer.tokens,
            inputs.prompt,
            system_prompt=inputs.system_prompt,
            negative_prompt=inputs.negative_prompt,
            vit=vit,
            reference=inputs.grid if reads_source else None,
            noise=inputs.grid,
            served=self.options,
        )
        before_text = inputs.task == "i2v" and self.options.choices.i2v_noise_place == "before_text"
        plan = plan_generation(prompt, self.options.choices.uncond_positions, before_text)
        noise = torch.stack(
            [
                standard_normal(
                    (plan.num_latents, self.vae.z_channels), nth_seed(inputs.seed, image), 0, 0
                )
                for image in range(inputs.num_images)
            ]
        ).to(self.device)
        if first is not None:
            noise[:, : len(first)] = first
        cond, uncond, unseen = plan.capacities()
        guided, guides_image = inputs.guidance.guides_text, inputs.guidance.guides_image
        slots = inputs.num_images * (
            cond + uncond + 2 * plan.block + guides_image * (unseen + plan.block)
        )
        if self.network.language_model.cache_nbytes(slots) > reserved_bytes:
            raise RequestFailed(
                "capacity", "the request needs more memory than its session has reserved"
            )
        return ImageGeneration(
            plan=plan,
            visuals=visuals,
            guidance=inputs.guidance,
            timesteps=flow_timesteps(inputs.num_steps, inputs.shift),
            latents=noise,
            cond=[new_cache(cond, plan.block) for _ in range(inputs.num_images)],
            uncond=[
                new_cache(uncond, plan.block) for _ in range(inputs.num_images if guided else 0)
            ],
            unseen=[
                new_cache(unseen, plan.block)
                for _ in range(inputs.num_images if guides_image else 0)
            ],
            pinned=0 if first is None else len(first),
            step_cache=inputs.step_cache,
        )

    def start_understanding(
        self, inputs: UnderstandingInputs, chunk_tokens: int | None, timer: StageTimer
    ) -> UnderstandingChunk:
        """Start an understanding request.

        Args:
            inputs: The validated request.
            chunk_tokens: Number of text tokens per request. None: one request generates the whole
                text.
            timer: Timer of the request's stages.
        """
        rows = grid = None
        if inputs.source is not None:
            rows, grid = self._see(inputs.source.to(self.device), inputs.preset, timer)
        prompt = build_prompt(
            inputs.task,
            self.tokenizer.tokens,
            inputs.prompt,
            system_prompt=inputs.system_prompt,
            vit=grid,
            served=self.options,
            messages=inputs.messages,
            image_message=inputs.image_message,
        )
        anchored = self.options.choices.understanding_vit_time == "origin"
        context = position_segments(prompt.cond, positions(prompt.cond, anchor_vit=anchored))
        prompt_tokens = sum(placed.segment.length for placed in context)
        return UnderstandingChunk(
            cache=self.network.language_model.new_cache(prompt_tokens + inputs.max_tokens),
            rules=TextRules(
                choice=inputs.choice,
                seed=inputs.seed,
                max_tokens=inputs.max_tokens,
                end_token=self.tokenizer.ids[IM_END],
                stop=inputs.stop,
            ),
            chunk_tokens=inputs.max_tokens if chunk_tokens is None else chunk_tokens,
            context=context,
            visuals=VisualContents(rows),
            prompt_tokens=prompt_tokens,
        )

    def _encode(self, pixels_CTHW: torch.Tensor, seed: int) -> torch.Tensor:
        """Encode pixels to normalised latents [C, t, h, w], fp32."""
        generator = None
        if self.options.choices.reference_latent == "sample":
            generator = torch.Generator().manual_seed(noise_seed(seed, 0, 1))
        return self.vae.encode_video(pixels_CTHW.unsqueeze(0), generator)[0]

    def _see(
        self, source: torch.Tensor, preset: SizePreset | None, timer: StageTimer
    ) -> tuple[torch.Tensor, Grid]:
        """Encode frames with the vision tower. Return the embeddings and their grid."""
        with timer.stage("vision"):
            patches, grid = to_patches(for_vit(source, preset))
            return self.vision(patches, grid), decoder_grid(grid)


def continue_understanding(response: TextReply, request: DiffusionRequest) -> UnderstandingChunk:
    """Return the next chunk of a text that several requests generate.

    Raises:
        RequestFailed: The text is complete, or the request contains a prompt, options or tensors.
    """
    params = request.params
    if params.prompt is not None or params.options or request.tensors:
        raise RequestFailed(
            "invalid_request",
            "this session is generating a text: omit prompt, options and tensors to continue, or "
            "use another session",
        )
    if response.progress.finish_reason is not None:
        raise RequestFailed(
            "out_of_order",
            "the text of this session is complete; close the session and use another",
        )
    return UnderstandingChunk(
        cache=response.cache,
        rules=response.rules,
        chunk_tokens=response.chunk_tokens,
        progress=response.progress,
        prompt_tokens=response.prompt_tokens,
        first_token=len(response.progress.tokens),
    )
