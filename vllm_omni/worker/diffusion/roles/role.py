# SPDX-License-Identifier: Apache-2.0
"""`Role`: the work of one rank in an engine step, and its messages to other pipeline stages.

A rank has the same role for its lifetime (`vllm_omni.worker.diffusion.roles.role_for`). The runner
calls the role and does not depend on the engine topology. Only roles write `DiffusionRequest.step`.
With several ranks, every decision that precedes a collective must be the same on all ranks
(`RankAgreement`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_pp_group,
    get_tp_group,
    get_world_group,
)
from vllm.sequence import IntermediateTensors

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.interfaces import (
    SupportsChunksInFlight,
    SupportsParallelDecode,
    SupportsStepExecution,
    SupportsVAEStage,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.linear.linear import check_quantization
from vllm_omni.model_executor.layers.lora.store import NoAdapters
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.registration import steps_one_at_a_time
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.decode import ChunkEnd, ResultStream
from vllm_omni.worker.diffusion.link import ReturnChannel, connect_forward
from vllm_omni.worker.diffusion.pacing import StepPacer
from vllm_omni.worker.diffusion.sessions.admission import Admission
from vllm_omni.worker.diffusion.sessions.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.sessions.store import SessionStore
from vllm_omni.worker.diffusion.shared_text import SharedText

Envelopes = dict[str, torch.Tensor]
"""Packed results and packed failures, keyed by request id."""


@dataclass(frozen=True)
class RankParts:
    """The objects that a role uses. Each rank creates these objects once, after loading the
    model.
    """

    omni: OmniConfig
    """Options of this package."""
    device: torch.device
    """Device of the rank."""
    parallel: ParallelContext
    """Position of the rank: its stage, and its position among the ranks that share layers."""
    pp: GroupCoordinator
    """Pipeline group of the rank."""
    num_ranks: int
    """Number of ranks in the engine."""
    step_at_a_time: bool
    """Whether the scheduler runs one denoise step per engine step."""
    model: SupportsStepExecution
    """The model, as an interface for denoise steps."""
    adapters: NoAdapters
    """Store of the LoRA adapters registered on this rank."""
    agreement: RankAgreement
    """Agreement with the other ranks."""
    sessions: SessionStore
    """Sessions of the rank."""
    in_flight: ChunksInFlight
    """Chunks in flight on the rank."""
    admission: Admission
    """Admits and releases requests."""
    results: ResultStream
    """Decodes chunks and copies results to the host."""
    pacer: StepPacer
    """Limits how far the host runs ahead of the device."""
    texts: SharedText
    """Distributes text embeddings to the ranks with layers."""
    decodes: bool
    """Whether this rank takes part in decoding if its stage decodes."""
    shares_decode: bool
    """Whether the ranks that share a stage decode together."""
    overlap: bool
    """Whether the result of a chunk is returned in a later engine step than the one that runs the
    chunk's last step.
    """
    max_batch_size: int
    """Maximum number of requests in one forward pass."""

    @classmethod
    def of_config(
        cls,
        vllm_config: VllmConfig,
        network: nn.Module,
        model: SupportsStepExecution,
        adapters: NoAdapters,
        device: torch.device,
        parallel: ParallelContext,
        agreement: RankAgreement,
        sessions: SessionStore,
    ) -> Self:
        """Create the objects for a rank.

        Args:
            vllm_config: Configuration of the engine.
            network: The loaded model.
            model: The loaded model, as an interface for denoise steps.
            adapters: Store of the LoRA adapters registered on this rank.
            device: Device of the rank.
            parallel: Position of the rank.
            agreement: Agreement with the other ranks.
            sessions: Sessions of the rank.

        Raises:
            ValueError: No layer supports the quantization method.
        """
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        pp, tp, num_ranks = get_pp_group(), get_tp_group(), get_world_group().world_size
        in_flight = ChunksInFlight(omni.chunks_in_flight)
        if omni.ahead is not None:
            assert isinstance(network, SupportsChunksInFlight)
            in_flight.order.lag_steps = network.lag_steps
        shares_decode = isinstance(network, SupportsParallelDecode) and network.shares_decode
        assert isinstance(network, SupportsParallelDecode) or not omni.vae_parallel
        assert isinstance(network, SupportsVAEStage) or not omni.vae_stage
        if vllm_config.quant_config is not None and not parallel.is_vae_stage:
            check_quantization(network, vllm_config.model_config.quantization)
        step_at_a_time = steps_one_at_a_time(vllm_config)
        several_gpus = device.type == "cuda" and num_ranks > 1
        overlap = step_at_a_time and (
            several_gpus if omni.overlap_decode is None else omni.overlap_decode
        )
        return cls(
            omni=omni,
            device=device,
            parallel=parallel,
            pp=pp,
            num_ranks=num_ranks,
            step_at_a_time=step_at_a_time,
            model=model,
            adapters=adapters,
            agreement=agreement,
            sessions=sessions,
            in_flight=in_flight,
            admission=Admission(model, sessions, in_flight, device, adapters),
            results=ResultStream(device, overlap, overlaps_steps=not omni.vae_stage),
            pacer=StepPacer(device, stages=pp.world_size > 1),
            texts=SharedText(model, tp, first_stage=parallel.first_stage),
            decodes=tp.is_first_rank or shares_decode,
            shares_decode=shares_decode,
            overlap=overlap,
            max_batch_size=1 if omni.batch_invariant else omni.max_requests_per_step,
        )


class Role(ABC):
    """Defines the work of one rank. The work depends on the engine topology.

    Args:
        parts: Objects that the rank uses.
    """

    decodes_chunks: ClassVar[bool] = False
    """Whether chunks are finished on this rank, after the last layers (`ChunkEnd.finish`)."""

    def __init__(self, parts: RankParts) -> None:
        self.parts = parts
        self.model = parts.model
        self.agreement = parts.agreement
        self.in_flight = parts.in_flight
        self.admission = parts.admission
        self.pacer = parts.pacer
        self.channel: ReturnChannel | None = None
        self.chunk_end = ChunkEnd(
            parts.model,
            parts.adapters,
            parts.agreement,
            parts.in_flight,
            parts.results,
            decodes=parts.decodes and self.decodes_chunks,
            shares_decode=parts.shares_decode,
            overlap=parts.overlap,
        )

    def connect(self) -> None:
        """Connect all stages in the forward direction, and the stages with layers also in the
        backward direction (collective).

        This method must be called before the first chunk.
        """
        connect_forward(self.parts.pp, self.parts.device)
        stages = self.parts.parallel.num_stages
        if stages > 1:
            self.channel = ReturnChannel(self.parts.pp.ranks[:stages], self.parts.device)

    @abstractmethod
    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        """Run one engine step.

        Args:
            states: Scheduled requests.
            received: Tensors from the previous stage; None on the first stage.

        Returns:
            Tensors for the next stage. On the last stage, the results to deliver in this step.
        """

    @abstractmethod
    def micro_step(
        self,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: Envelopes,
    ) -> IntermediateTensors | None:
        """Advance each request by one denoise step.

        Args:
            states: Scheduled requests.
            received: Tensors from the previous stage; None on the first stage.
            outputs: Dict that receives the envelopes of finished and failed requests.

        Returns:
            Tensors for the next stage, or None on the last stage.
        """

    def receive_results(self, request_ids: Iterable[str]) -> None:  # noqa: B027 - most roles receive none
        """Apply all return messages from the last stage, up to and including the latest message
        about one of the given requests.
        """

    def listen(self) -> None:  # noqa: B027
        """Post the receives for return messages (`ReturnChannel.listen`).

        This method is called whenever hidden states have been sent.
        """


def pack_results(states: Sequence[RequestState], outputs: Envelopes) -> None:
    """Wait for the pending results of `states`, and add their envelopes to `outputs`."""
    for state in states:
        if state.pending is not None:
            outputs[state.request_id] = state.pending.envelope()
