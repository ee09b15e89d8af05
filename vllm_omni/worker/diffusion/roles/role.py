# SPDX-License-Identifier: Apache-2.0
"""`Role`: one rank's part of an engine step, and its messages to other pipeline stages.

A rank has one role from start to end (`vllm_omni.worker.diffusion.roles.role_for`); the runner calls it and knows no
topology. Roles alone write `DiffusionRequest.step`. On several ranks every decision that comes before a collective must
be the same on all of them (`RankAgreement`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.sequence import IntermediateTensors

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.interfaces import SupportsStepExecution
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.worker.diffusion.admission import Admission
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.decode import ChunkEnd, ResultStream
from vllm_omni.worker.diffusion.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.link import ReturnChannel, connect_forward
from vllm_omni.worker.diffusion.pacing import StepPacer
from vllm_omni.worker.diffusion.sessions import SessionStore

Envelopes = dict[str, torch.Tensor]
"""Request id -> its packed result, or its packed failure."""


@dataclass(frozen=True)
class RankParts:
    """The objects that a role works with; one set per rank, made when the model has been loaded.

    place: this rank's stage. num_ranks: of the whole engine. step_at_a_time: whether the scheduler runs one denoise
    step per engine step. decodes: whether this rank takes part where its stage decodes; shares_decode: the ranks that
    share a stage then decode together. overlap: a result comes with a later step than the chunk's last one.
    """

    omni: OmniConfig
    device: torch.device
    place: ParallelContext
    pp: GroupCoordinator
    num_ranks: int
    step_at_a_time: bool
    model: SupportsStepExecution
    agreement: RankAgreement
    sessions: SessionStore
    in_flight: ChunksInFlight
    admission: Admission
    results: ResultStream
    pacer: StepPacer
    decodes: bool
    shares_decode: bool
    overlap: bool


class Role(ABC):
    """One rank's part in the engine's topology."""

    decodes_chunks: ClassVar[bool] = False
    """Whether chunks end here, beside the last layers (`ChunkEnd.finish`)."""

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
            parts.agreement,
            parts.in_flight,
            parts.results,
            decodes=parts.decodes and self.decodes_chunks,
            shares_decode=parts.shares_decode,
            overlap=parts.overlap,
        )

    def connect(self) -> None:
        """Open the way from stage to stage, and back between those with layers. Collective, before the first chunk."""
        connect_forward(self.parts.pp, self.parts.device)
        stages = self.parts.place.num_stages
        if stages > 1:
            self.channel = ReturnChannel(self.parts.pp.ranks[:stages], self.parts.device)

    @abstractmethod
    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        """One engine step: returns the tensors for the next stage, or, on the last stage, the results due now."""

    @abstractmethod
    def micro_step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None, outputs: Envelopes
    ) -> IntermediateTensors | None:
        """Advance each request by one denoise step; finished and failed ones leave their envelope in `outputs`.

        Returns the tensors for the next stage, or None on the last one.
        """

    def take_answers(self, request_ids: Iterable[str]) -> None:  # noqa: B027 - most roles get no answers
        """Apply the last stage's answers up to the newest that concerns one of `request_ids`."""

    def listen(self) -> None:  # noqa: B027
        """To be called whenever hidden states have been sent (`ReturnChannel.listen`)."""


def delivering(states: Sequence[RequestState]) -> list[RequestState]:
    """Chunks of earlier steps whose results are on their way to the host."""
    return [state for state in states if state.done and state.pending is not None]


def envelopes(states: Sequence[RequestState]) -> Envelopes:
    """Wait for the results of `states`, and pack them."""
    return {state.request_id: state.pending.envelope() for state in states if state.pending is not None}
