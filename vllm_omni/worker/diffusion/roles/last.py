# SPDX-License-Identifier: Apache-2.0
"""The last of several pipeline stages: it has the last layers and the decoder."""

from vllm_omni.worker.diffusion.roles.role import Envelopes
from vllm_omni.worker.diffusion.roles.with_layers import EndsSteps, MicroStep


class LastStage(EndsSteps):
    """Sends return messages to the earlier stages, decodes, and returns results to the engine."""

    decodes_chunks = True

    def _hand_on(self, done: MicroStep, outputs: Envelopes) -> None:
        self.chunk_end.pack_failures(done.states, outputs)
