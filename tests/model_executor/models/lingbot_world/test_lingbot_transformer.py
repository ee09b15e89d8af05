# SPDX-License-Identifier: Apache-2.0
"""Tests of transformer behaviour that the recorded tensors do not cover: batching, the
clean-context pass, precision and compiled ops.
"""

import pytest
import torch
from lingbot_rollout import CONFIG, inputs, load_tiny, make_row, make_window

from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer


def test_text_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"text must be \[<= 8, 24\], got 9x24"):
        load_tiny().cross_attention_kv(torch.zeros(9, 24))


@torch.no_grad()
def test_a_bf16_residual_stays_close() -> None:
    """In a bf16 model, using a bf16 rather than an fp32 residual stream changes the flow by less
    than 5 % of the largest flow value.
    """
    flows = []
    for residual_fp32 in (True, False):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LingBotTransformer(CONFIG, residual_fp32=residual_fp32)
        finally:
            torch.set_default_dtype(torch.float32)
        model.load_state_dict(load_tiny().state_dict())
        data = inputs()
        window = make_window(model, data, torch.bfloat16)
        flows.append(model([make_row(model, data, window, range(3), 700.0)]))
    assert not torch.equal(*flows)
    assert float((flows[0] - flows[1]).abs().max()) < 0.05 * float(flows[0].abs().max())


@torch.no_grad()
def test_compiled_ops_give_the_same_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled ops produce the same flow as plain ops (fp32, 1e-5) and are traced without graph
    breaks. The test uses the aot_eager backend, because it needs no C++ compiler.
    """
    real = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, **options: real(f, backend="aot_eager", fullgraph=True, **options),
    )
    plain, data = load_tiny(), inputs()
    compiled = LingBotTransformer(CONFIG, compiled=True)
    compiled.load_state_dict(plain.state_dict())
    flows = [
        model([make_row(model, data, make_window(model, data), range(3), 700.0)])
        for model in (plain, compiled)
    ]
    torch.testing.assert_close(flows[1], flows[0], atol=1e-5, rtol=0)
