# SPDX-License-Identifier: Apache-2.0
"""Lance adapters with PEFT's tensor names produce the same results as merging them into the weights
of both experts.
"""

from pathlib import Path

import pytest
import torch
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.chunks import step
from lance_driver import load_lance, prepare, request_of

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.lora.adapter import AdapterError
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.models.lance.pipeline import Lance

TOLERANCE = 2e-4
"""Tolerance for fp32 latents of magnitude 1 after three steps."""


def image(lance: Lance, store: AdapterStore, lora: list[Lora]) -> torch.Tensor:
    selection = store.select(lora)
    request = request_of("t2i", output="latents")
    with store.applied(selection):
        prepare(lance, request)
        while request.step < request.num_steps:
            step(lance, [request])
        return lance.post_decode(request)[1]["latents"]


def test_an_image_with_an_adapter_equals_merged_weights(checkpoint: Path, tmp_path: Path) -> None:
    """An image generated with an adapter equals an image generated with merged weights. The adapter
    changes every attention and feed-forward layer of both experts, the latent projections and the
    time layers.
    """
    lance = load_lance(checkpoint)
    target = lance.adapter_targets()["transformer"]
    made = files.factors(target, target.matrices(), seed=1)
    store = make_store(lance, {"ink": files.write_peft(made, tmp_path / "ink")})
    plain = image(lance, store, [])
    got = image(lance, store, [Lora(name="ink", scale=1.5)])
    assert torch.equal(image(lance, store, []), plain)
    reference = load_lance(checkpoint)
    files.merge(reference.network, files.differences(made, 1.5 * files.ALPHA / files.RANK))
    expected = image(reference, make_store(reference), [])
    assert not torch.allclose(expected, plain, atol=0.01)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_adapters_of_the_vocabulary_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """An adapter for the token embedding or the output matrix is rejected, because optimized code
    reads these matrices directly and would silently ignore the adapter.
    """
    lance = load_lance(checkpoint)
    head = {"language_model.lm_head": (torch.zeros(4, 64), torch.zeros(64, 4))}
    with pytest.raises(
        ValueError, match=r"keeps as they are: 2 \(base_model\.model\.language_model\.lm_head"
    ) as raised:
        make_store(lance, {"head": files.write_peft(head, tmp_path / "head")})
    assert isinstance(raised.value.__cause__, AdapterError)
