# SPDX-License-Identifier: Apache-2.0
"""The only pipeline stage: all layers and the decoder, on one rank or split over several ranks."""

from collections.abc import Sequence

from vllm.sequence import IntermediateTensors

from vllm_omni.core.chunk_order import turn
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.worker.diffusion.roles.last import LastStage
from vllm_omni.worker.diffusion.roles.role import Envelopes


class Single(LastStage):
    """One denoise step per engine step; the device time of each is reported to the scheduler."""

    def _before_launch(self, moves: bool) -> None:
        self.pacer.launching()


class WholeChunks(Single):
    """All steps of a chunk in one engine step, for schedulers that expect this (vLLM's own)."""

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        outputs = Envelopes()
        for state in sorted(states, key=_turn):  # chunks of a session run in order
            while state.request_id not in outputs:
                self.micro_step([state], None, outputs)
        return outputs


def _turn(state: RequestState) -> tuple[str, float]:
    return ("", 0.0) if state.params is None else (state.params.session_id, turn(state.params.chunk_index))
