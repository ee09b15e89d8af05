# SPDX-License-Identifier: Apache-2.0
"""The transformer beyond the goldens: batching, the clean-context pass, precision, compiled
chains.
"""

import pytest
import torch
from lingbot_rollout import CONFIG, inputs, load_tiny, make_row, make_window

from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.model_executor.models.wan.transformer.layers import patchify, unpatchify


@torch.no_grad()
def test_sessions_at_different_chunks_and_steps_share_a_forward() -> None:
    """Three rows - another chunk, another timestep, a clean pass - equal three forwards alone
    (1e-5, order of sums).
    """
    model, data = load_tiny(), inputs()
    plans = [(range(3, 6), 900.0), (range(3), 500.0), (range(6, 9), 0.0)]

    def rows() -> list:
        made = []
        for frames, timestep in plans:
            window = make_window(model, data)
            for start in range(0, frames.start, 3):
                model([make_row(model, data, window, range(start, start + 3), 0.0)])
                window.commit(start + 3)
            made.append(make_row(model, data, window, frames, timestep))
        return made

    together, apart = rows(), rows()
    flows = model(together)
    for flow, shared, row in zip(flows, together, apart, strict=True):
        torch.testing.assert_close(flow, model([row])[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(shared.window.buffer, row.window.buffer, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_context_pass_writes_the_same_keys_and_skips_the_rest() -> None:
    model, data = load_tiny(), inputs()
    full, short = make_window(model, data), make_window(model, data)
    model([make_row(model, data, full, range(3), 0.0)])
    prediction = model([make_row(model, data, short, range(3), 0.0)], kv_only=True)
    assert torch.equal(full.buffer, short.buffer)
    assert prediction.shape == (1, 16, 3, 4, 6)
    assert not prediction.any()


@torch.no_grad()
@pytest.mark.parametrize("part", ["camera", "context", "y", "noise"])
def test_every_input_matters(part: str) -> None:
    model, data = load_tiny(), inputs()
    before = model([make_row(model, data, make_window(model, data), range(3), 700.0)])
    data[part] = data[part] + 0.5
    after = model([make_row(model, data, make_window(model, data), range(3), 700.0)])
    assert not torch.allclose(before, after, atol=1e-3)


@torch.no_grad()
def test_positions_are_absolute_frames() -> None:
    """The same chunk at other frames, alone in its window, gives the same flow: only distances
    count (1e-4, fp32).
    """
    model, data = load_tiny(), inputs()
    early = make_row(model, data, make_window(model, data), range(3), 700.0)
    window = make_window(model, data)
    window.write(0, range(2), torch.zeros(12, 2, 16), torch.zeros(12, 2, 16))
    shifted = {
        name: value if name == "context" else torch.roll(value, 3, dims=-3)
        for name, value in data.items()
    }
    late = make_row(model, shifted, window, range(3, 6), 700.0)
    object.__setattr__(late, "frames", range(3))  # same slots, later rotation
    torch.testing.assert_close(model([late]), model([early]), atol=1e-4, rtol=0)


def test_text_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"text must be \[<= 8, 24\], got 9x24"):
        load_tiny().cross_attention_kv(torch.zeros(9, 24))


@torch.no_grad()
def test_a_residual_in_the_models_type_stays_close() -> None:
    """bf16 with a bf16 residual against a fp32 residual: within 5 % of the largest flow."""
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


def test_patches_hold_channel_row_column_and_come_back_row_column_channel() -> None:
    x = torch.arange(2 * 1 * 4 * 2, dtype=torch.float32).view(2, 1, 4, 2)
    tokens = patchify(x)
    assert tokens.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    back = unpatchify(tokens.view(2, 2, 4).transpose(1, 2).reshape(1, 2, 8), (1, 4, 2))
    assert torch.equal(back[0], x)


@torch.no_grad()
def test_compiled_chains_give_the_same_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, without graph breaks, as for a real backend; aot_eager needs no C++
    compiler. fp32, 1e-5.
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
