# SPDX-License-Identifier: Apache-2.0
"""The schedule simulation against closed forms."""

import importlib
from pathlib import Path

import pytest

from benchmarks.pipeline_simulator import Pipeline, chunk_period_ms

T = 100.0


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("denoise", [1, 2, 4])
def test_periods_equal_the_closed_forms(stages: int, denoise: int) -> None:
    """Strict: S T + T / P for one stream. Noise-matched with P chunks in flight: S T / P."""
    common = {"pass_ms": T, "decode_ms": 0.0, "stages": stages, "denoise": denoise, "hop_ms": 0.0}
    strict = chunk_period_ms(Pipeline(**common))  # type: ignore[arg-type]
    assert strict == pytest.approx(denoise * T + T / stages, rel=0.02)
    matched = chunk_period_ms(Pipeline(**common, strict=False, in_flight=stages), 32)  # type: ignore[arg-type]
    assert matched == pytest.approx(denoise * T / stages, rel=0.02)


def test_a_vae_rank_hides_the_decode() -> None:
    """On the last stage it adds to each chunk; on a rank of its own the slower of the two decides."""
    assert chunk_period_ms(Pipeline(T, 50.0)) == pytest.approx(5 * T + 50.0)
    assert chunk_period_ms(Pipeline(T, 50.0, vae_rank=True)) == pytest.approx(5 * T)
    assert chunk_period_ms(Pipeline(T, 900.0, vae_rank=True)) == pytest.approx(900.0)


def test_the_plot_and_the_tables_of_the_docs_are_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/parallelism_curves.py --write` renews them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    script = importlib.import_module("parallelism_curves")
    assert script.PLOT.read_text() == script.svg(script.plots())
    page = script.PAGE.read_text()
    assert script.page(page) == page and "| causal Wan 1.3B | 1 GPU + VAE, CUDA graphs | 2 | 1 |" in page
    rows = script.measured_rows()
    assert {row.gpus for row in rows} == {1, 2, 4} and all(row.fps > 0 and row.why for row in rows)
