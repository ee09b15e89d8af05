# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA with speculative decoding: n-gram drafts and an EAGLE-3 drafter."""

from pathlib import Path

import pytest
import torch
from ar_cuda import FINAL, ON_CUDA, PROMPTS, Engine, Reference, check_ngram_drafts, write_model
from ar_eagle import BLOCKS, DRAFTER_LAYERS, write_eagle3_drafter
from ar_engine import params
from helpers.ar_compatibility import feature

pytestmark = ON_CUDA


@feature("speculative decoding (ngram)", "V2")
def test_rejected_drafts_have_no_hidden_states(
    cuda_language_model: Path, reference: Reference
) -> None:
    check_ngram_drafts(cuda_language_model, reference, "V2")


@pytest.mark.nightly
def test_rejected_drafts_have_no_hidden_states_on_v1(
    cuda_language_model: Path, reference: Reference
) -> None:
    check_ngram_drafts(cuda_language_model, reference, "V1")


@feature("speculative decoding (EAGLE-3, its layers)", "V2")
def test_a_drafter_and_requests_read_the_same_layers(tmp_path: Path) -> None:
    """The hidden states of accepted tokens are correct, even for layers that the drafter also
    reads.

    The engine runs in fp32, because wrong hidden states stand out clearly in that precision.
    """
    model = write_model(tmp_path / "model", num_hidden_layers=BLOCKS)
    drafter = write_eagle3_drafter(model, tmp_path / "drafter")
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2}
    layers = {"hidden_state_layers": list(DRAFTER_LAYERS)}
    reference = Reference(model, dtype=torch.float32)
    with Engine(model, "V2", layers, dtype="float32", speculative_config=speculative) as running:
        for mode in ("all", "generated", "last"):
            requested = params(mode, (2, 5, -1), max_tokens=24, output_kind=FINAL)
            [[output]] = running.run((PROMPTS[3], requested))
            reference.check(output, mode, (2, 5, -1))
