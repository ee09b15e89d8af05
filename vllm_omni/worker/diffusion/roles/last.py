# SPDX-License-Identifier: Apache-2.0
"""The last of several pipeline stages, where the decoder sits beside the last layers.

Held by tests/engine/test_parallel.py.
"""

from vllm_omni.worker.diffusion.roles.role import Envelopes
from vllm_omni.worker.diffusion.roles.with_layers import EndsSteps, MicroStep


class LastStage(EndsSteps):
    """It answers the earlier stages, decodes, and gives the engine its results."""

    decodes_chunks = True

    def _hand_on(self, done: MicroStep, outputs: Envelopes) -> None:
        self.chunk_end.pack_failures(done.states, outputs)
