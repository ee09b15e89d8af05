# SPDX-License-Identifier: Apache-2.0
"""Lance served: drawings take denoise steps and answers decode tokens in the same batches, on the
same weights.

    prepare_encode
        check, place every token, encode references (vision tower, autoencoder), draw noise
    denoise_step      one `Stepper.step` for the batch: contexts, velocities, tokens
    step_scheduler    Euler step with guidance; tokens to the host
    post_decode       latents -> uint8 pictures or frames, tokens -> text
    commit            an answer read in pieces moves on in its session

`Lance` is the algorithm and needs no engine; vLLM loads `LancePipeline`, which owns one.
Held by tests/model_executor/models/lance/test_lance_pipeline.py and tests/engine/test_lance.py.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SupportsStepExecution
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.lance.checkpoint import (
    ComponentSource,
    LanceLayout,
    find_layout,
    lance_config,
)
from vllm_omni.model_executor.models.lance.config import (
    PIXELS_PER_LATENT,
    READING_TASKS,
    TOKENS_PER_STEP,
    VIDEO_TASKS,
    LanceConfig,
    LanceOptions,
    Task,
)
from vllm_omni.model_executor.models.lance.network.pack import BranchCache
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.network.vae import (
    LanceVAEConfig,
    LanceWanVAE,
    from_tokens,
    to_uint8,
)
from vllm_omni.model_executor.models.lance.network.vision import VisionTower
from vllm_omni.model_executor.models.lance.request import (
    GenerationInputs,
    find_task,
    largest_needs,
    parse_request_options,
    read_generation,
    read_question,
)
from vllm_omni.model_executor.models.lance.state import LanceSession, TextReply
from vllm_omni.model_executor.models.lance.tasks.generation import ImageGeneration
from vllm_omni.model_executor.models.lance.tasks.prompt import (
    VISION_END,
    VISION_START,
    LanceTokenizer,
)
from vllm_omni.model_executor.models.lance.tasks.starting import Starter, continue_understanding
from vllm_omni.model_executor.models.lance.tasks.stepper import Stepper
from vllm_omni.model_executor.models.lance.tasks.understanding import Understanding
from vllm_omni.model_executor.models.lance.weights import (
    adapter_target,
    load_network,
    load_vae,
    load_vision,
)
from vllm_omni.model_executor.step_cache import step_cache_meta
from vllm_omni.model_executor.vllm_model import (
    CheckpointPipeline,
    ServedCheckpoint,
    compiles,
    launches_graphs,
)

_KEPT_GRAPHS = 16
"""Of the batches of drawings that run now."""


@dataclass(frozen=True)
class LanceSetup:
    """Everything a `Lance` is built from, resolved and checked. dtype: the decoder's."""

    config: LanceConfig
    vae_config: LanceVAEConfig
    tokenizer: Path
    options: LanceOptions
    parallel: ParallelContext
    dtype: torch.dtype
    compiled: bool = False
    cuda_graphs: bool = False
    quantization: QuantizationConfig | None = None

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: dict[str, Any],
        layout: LanceLayout,
        omni: OmniConfig,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        eager: bool = True,
        quantization: QuantizationConfig | None = None,
        offloads: bool = False,
    ) -> "LanceSetup":
        """Read a checkpoint's `hf_config(...)["lance"]`; `parallel` None = vLLM's groups.

        Raises ValueError.

        eager, offloads: as of `ServedCheckpoint`.
        """
        options = LanceOptions.parse(omni.model)
        parallel = parallel or ParallelContext.from_vllm(options.sequence_parallel)
        assert parallel.num_stages == 1
        if layout.tokenizer is None:
            raise ValueError(
                f"{layout.decoder} lacks tokenizer.json; run `vllm-omni download lance "
                f"{layout.root}`"
            )
        base, decoder_base = checkpoint["vae_dims"]
        return cls(
            config=lance_config(checkpoint),
            vae_config=LanceVAEConfig(base_dim=base, decoder_base_dim=decoder_base),
            tokenizer=layout.tokenizer,
            options=options,
            parallel=parallel,
            dtype=dtype,
            compiled=compiles(options.compile, eager),
            # ranks exchange rows within a layer, which no graph may hold
            cuda_graphs=parallel.size == 1 and launches_graphs(None, eager, offloads),
            quantization=quantization,
        )


@dataclass(eq=False)
class Work:
    """A request's state from `prepare_encode` on: a drawing with its checked request, or a
    reading.
    """

    task: Task
    generation: ImageGeneration | None = None
    inputs: GenerationInputs | None = None
    understanding: Understanding | None = None


Request = DiffusionRequest[LanceSession, Work]


class Lance(nn.Module):
    """Implements `SupportsStepExecution`, `PoolsMemory`."""

    supports_step_execution: ClassVar[bool] = True

    def __init__(self, setup: LanceSetup) -> None:
        super().__init__()
        self.config, self.options, self.parallel = setup.config, setup.options, setup.parallel
        self.tokenizer = LanceTokenizer(
            setup.tokenizer, setup.config.special, setup.config.vocab_size
        )
        with default_dtype(setup.dtype):
            self.network = LanceNetwork(
                setup.config,
                setup.parallel,
                compiled=setup.compiled,
                quantization=setup.quantization,
            )
            self.vision = VisionTower(setup.config.vision)
        self.vae = LanceWanVAE(setup.vae_config, setup.options.vae_torch_dtype(setup.dtype))
        markers = (self.tokenizer.ids[VISION_START], self.tokenizer.ids[VISION_END])
        graphs = ForwardGraphs(_KEPT_GRAPHS) if setup.cuda_graphs else None
        self.stepper = Stepper(self.network, markers, self.tokenizer.size, graphs)
        self.starter = Starter(self.tokenizer, self.vision, self.vae, self.network)

    @property
    def device(self) -> torch.device:
        return self.network.language_model.device

    def load_checkpoint(self, layout: LanceLayout) -> None:
        """Fill every parameter this rank has, strictly. Raises ValueError."""
        layout.require()
        assert layout.weights is not None and layout.vae is not None
        source = open_tensors(layout.weights)
        load_network(self.network, source, self.config)
        separate = layout.vision_weights
        own = None if separate is None else open_tensors(separate)
        load_vision(self.vision, self.config.vision, own, source)
        load_vae(self.vae, open_tensors(layout.vae))
        if self.stepper.graphs is not None:
            self.stepper.graphs.clear_graphs()

    def adapter_targets(self) -> dict[str, AdapterTarget]:
        return {"transformer": adapter_target(self.network, self.config)}

    # -- sessions ----------------------------------------------------------------------------------

    def session_nbytes(self, params: DiffusionParams) -> int:
        options = parse_request_options(params)
        tokens = self.tokenizer.tokens
        slots, latents = largest_needs(
            params, options, lambda text: len(tokens.encode_user(text)), self.config, self.options
        )
        decoder = self.network.language_model
        # Noise, latents and the branches' velocities in fp32, the latents' position rows in the
        # decoder's type.
        branches = 3 if options.cfg_img_scale > 1.0 else 2
        row = (
            4 * (2 + branches) * self.vae.z_channels
            + self.config.hidden_size * decoder.dtype.itemsize
        )
        return decoder.cache_nbytes(slots) + latents * row

    def new_session(self, params: DiffusionParams) -> LanceSession:
        return LanceSession(params.session_id, self.session_nbytes(params))

    # -- one request -------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session, params = request.session, request.params
        if session.reply is not None:
            understanding = continue_understanding(session.reply, request)
            request.state = Work(session.reply.task, understanding=understanding)
            request.num_steps = self._understanding_steps(understanding)
            return
        options = parse_request_options(params)
        task = find_task(params, options, request.tensors)
        if task in READING_TASKS:
            question = read_question(params, options, task, request.tensors, self.options)
            understanding = self.starter.start_understanding(
                question, options.chunk_tokens, request.timer
            )
            request.state = Work(task, understanding=understanding)
            request.num_steps = self._understanding_steps(understanding)
        else:
            inputs = read_generation(
                params, options, task, request.tensors, self.config, self.options
            )
            generation = self.starter.start_generation(
                inputs, session.reserved_bytes, request.timer, self._new_cache
            )
            request.state = Work(task, generation=generation, inputs=inputs)
            request.num_steps = 1 + inputs.num_steps

    def _new_cache(self, capacity: int, block: int) -> BranchCache:
        """A drawing's, one that an ended drawing had if there are graphs that know it."""
        decoder, graphs = self.network.language_model, self.stepper.graphs
        if graphs is None:
            return decoder.new_cache(capacity, block)
        return decoder.take_cache(graphs.pool, capacity, block)

    def batch_key(self, request: Request) -> Hashable:
        """All requests may share a forward: drawings of every size, answers, contexts."""
        return "lance"

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the batch; each request's results are kept in its own state.

        Returns an empty tensor.
        """
        works = [request.work for request in batch]
        self.stepper.step(
            [work.generation for work in works if work.generation is not None],
            [work.understanding for work in works if work.understanding is not None],
            TOKENS_PER_STEP,
        )
        return torch.empty(len(batch), 0, device=self.device)

    @torch.no_grad()
    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        for request in batch:
            work = request.work
            if work.generation is not None:
                work.generation.advance()
        for request in batch:  # last: these wait for the device
            understanding = request.work.understanding
            if understanding is not None:
                understanding.settle(self.tokenizer.decode)
                if understanding.done:
                    request.end_with_this_step()

    def latents(self, request: Request) -> torch.Tensor:
        work = request.work
        if work.generation is not None:
            return work.generation.latents
        assert work.understanding is not None
        return torch.zeros(1) if work.understanding.logits is None else work.understanding.logits

    def set_latents(self, request: Request, latents: torch.Tensor) -> None:
        raise NotImplementedError("Lance does not run on several pipeline stages")

    @torch.no_grad()
    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        work = request.work
        if work.understanding is not None:
            return self._response(work.understanding, request)
        inputs, generation = work.inputs, work.generation
        assert inputs is not None and generation is not None
        meta: dict[str, Any] = {
            "task": work.task,
            "seed": inputs.seed,
            "height": inputs.size[0],
            "width": inputs.size[1],
            "num_inference_steps": inputs.num_steps,
        }
        meta |= step_cache_meta(generation.step_cache, generation.computed)
        video = work.task in VIDEO_TASKS
        if video:
            meta |= {"num_frames": inputs.num_frames, "fps": inputs.fps}
        latents = [from_tokens(tokens, generation.plan.grid) for tokens in generation.latents]
        if request.params.output == "latents":
            return meta, {"latents": torch.stack(latents).contiguous()}
        images = [to_uint8(self.vae.decode_video(latent.unsqueeze(0))[0]) for latent in latents]
        return meta, {"frames": images[0]} if video else {"images": torch.cat(images)}

    def commit(self, request: Request) -> None:
        session, understanding, generation = (
            request.session,
            request.work.understanding,
            request.work.generation,
        )
        if generation is not None and self.stepper.graphs is not None:
            for cache in generation.release_caches():
                self.stepper.graphs.pool.return_memory(cache)
        if understanding is not None:
            progress = understanding.progress
            sent = progress.sent + len(
                progress.new_text(self.tokenizer.decode, understanding.rules)
            )
            session.reply = TextReply(
                request.work.task,
                understanding.cache,
                understanding.rules,
                understanding.chunk_tokens,
                understanding.prompt_tokens,
                replace(progress, sent=sent),
            )
        session.chunk_index += 1

    def trim_pool(self, nbytes: int) -> None:
        if self.stepper.graphs is not None:
            self.stepper.graphs.pool.trim(nbytes)

    def warmup_inputs(self) -> list[Inputs]:
        """One step of the largest picture and, if this checkpoint makes videos, of the longest one.

        Two where steps become CUDA graphs: the second is captured.
        """
        options = self.options
        steps = 1 if self.stepper.graphs is None else 2
        side = min(
            math.isqrt(options.max_image_pixels) // PIXELS_PER_LATENT * PIXELS_PER_LATENT,
            self.config.max_side,
        )
        common: dict[str, Any] = {
            "prompt": "warm-up",
            "num_inference_steps": steps,
            "one_shot": True,
        }
        inputs: list[Inputs] = [
            (DiffusionParams(session_id="warm-up-image", height=side, width=side, **common), {}),
        ]
        if self.config.makes_video:
            side = min(
                math.isqrt(options.max_video_pixels) // PIXELS_PER_LATENT * PIXELS_PER_LATENT,
                self.config.max_side,
            )
            frames = min(options.max_num_frames, self.config.max_frames)
            inputs.append(
                (
                    DiffusionParams(
                        session_id="warm-up-video",
                        height=side,
                        width=side,
                        num_frames=frames,
                        **common,
                    ),
                    {},
                )
            )
        return inputs

    # -- answers -----------------------------------------------------------------------------------

    def _understanding_steps(self, understanding: Understanding) -> int:
        """The most engine steps that the chunk may take."""
        return -(-understanding.wanted // TOKENS_PER_STEP)

    def _response(
        self, understanding: Understanding, request: Request
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        progress = understanding.progress
        meta = {
            "task": request.work.task,
            "text": progress.new_text(self.tokenizer.decode, understanding.rules),
            "finish_reason": progress.finish_reason,
            "prompt_tokens": understanding.prompt_tokens,
            "completion_tokens": len(progress.tokens),
        }
        return meta, {
            "token_ids": torch.tensor(
                progress.tokens[understanding.first_token :], dtype=torch.int64
            )
        }


class LancePipeline(CheckpointPipeline[LanceLayout]):
    """Owns a `Lance`, which vLLM\'s model loader builds and fills through it."""

    @property
    def weights_sources(self) -> tuple[ComponentSource, ...]:
        """Which folder fills which part."""
        return self.served_layout().weight_sources()

    def find_layout(self, path: Path) -> LanceLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[LanceLayout]) -> Lance:
        values = served.hf_config.lance
        return Lance(
            LanceSetup.of_checkpoint(
                values,
                served.layout,
                served.omni,
                served.dtype,
                eager=served.eager,
                quantization=served.quantization,
                offloads=served.offloads,
            )
        )


if TYPE_CHECKING:

    def _meets_protocol(model: Lance) -> SupportsStepExecution[LanceSession, Work]:
        return model
