# SPDX-License-Identifier: Apache-2.0
"""Curves of frames per second over GPUs: measured runs, `plan`, and simulated schedules; as SVG and as a table.

    python benchmarks/parallelism_curves.py                # print the table
    python benchmarks/parallelism_curves.py --write        # and write docs/user_guide/parallelism.svg

Needs no GPU. LingBot World at 480x832; the simulation takes a pass's and a decode's milliseconds from `plan`.
"""

import argparse
import json
from pathlib import Path

from vllm_omni.planning.cards import H200
from vllm_omni.planning.cost import Split, decode_ms, pass_ms, predict
from vllm_omni.planning.models import model_of
from vllm_omni.planning.simulate import Pipeline, chunk_period_ms

REPO = Path(__file__).parents[1]
PLOT = REPO / "docs" / "user_guide" / "parallelism.svg"
GPUS = (1, 2, 4)
_COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7")
Curve = dict[int, float]


def curves() -> dict[str, Curve]:
    """Name -> GPUs -> frames per second of all sessions together."""
    model = model_of("lingbot_world")
    frames = 1e3 * model.frames_per_chunk
    one, decode = pass_ms(model, H200, model.window), decode_ms(model, H200)

    def simulated(gpus: int, **fields: object) -> float:
        return frames / chunk_period_ms(Pipeline(one, decode, **fields))  # type: ignore[arg-type]

    return {
        "Ulysses, 1 session: measured": _measured("sequence"),
        "Ulysses, 1 session: plan": {n: predict(model, H200, Split(n)).fps for n in GPUS},
        "PP, n sessions: measured": _measured("pipeline"),
        "PP, n sessions: plan": {n: predict(model, H200, Split(1, n), n).fps for n in GPUS},
        "PP strict, 1 session: simulated": {n: simulated(n, stages=n) for n in GPUS},
        "noise-matched PP + VAE rank, 1 session: simulated": {
            n: simulated(n, stages=n - 1, strict=False, vae_rank=True, in_flight=n - 1) for n in GPUS if n > 1
        },
    }


def _measured(kind: str) -> Curve:
    found: Curve = {}
    for path in sorted((REPO / "benchmarks" / "results").glob("*_lingbot_world*.json")):
        result = json.loads(path.read_text())["result"]
        parallel, gpus = result["parallel"], max(result["parallel"].values())
        if "overlap" not in path.stem and parallel[kind] == gpus:
            found[gpus] = result["fps_all_sessions"]
    return dict(sorted(found.items()))


def table(found: dict[str, Curve]) -> str:
    lines = ["| | " + " | ".join(f"{n} GPU{'s' if n > 1 else ''}" for n in GPUS) + " |", "|---" * (len(GPUS) + 1) + "|"]
    for name, curve in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{curve[n]:.1f}" if n in curve else "-" for n in GPUS) + " |")
    return "\n".join(lines)


def svg(found: dict[str, Curve]) -> str:
    wide, high, left, top = 720, 420, 50, 20
    most = 10 * (1 + int(max(fps for curve in found.values() for fps in curve.values()) // 10))

    def place(gpus: int, fps: float) -> tuple[float, float]:
        return left + (gpus - 1) * (wide - left - 330) / (GPUS[-1] - 1), high - 40 - fps * (high - 40 - top) / most

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif">']
    parts.append(f'<rect width="{wide}" height="{high}" fill="white"/>')
    for fps in range(0, most + 1, 10):
        x, y = place(1, fps)
        end = place(GPUS[-1], fps)[0]
        parts.append(f'<path d="M{x:.0f} {y:.0f}H{end:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" font-size="12" text-anchor="end">{fps}</text>')
    for gpus in GPUS:
        x, y = place(gpus, 0)
        parts.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" font-size="12" text-anchor="middle">{gpus}</text>')
    parts.append(
        f'<text x="{left}" y="{high - 6}" font-size="12">GPUs (H200); frames per second, LingBot 480x832</text>'
    )
    for number, (name, curve) in enumerate(found.items()):
        colour, dash = _COLOURS[number], "" if "measured" in name else ' stroke-dasharray="5 4"'
        points = [place(gpus, fps) for gpus, fps in curve.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        row = top + 16 + 20 * number
        parts.append(f'<text x="{wide - 312}" y="{row}" font-size="12" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the plot into the docs")
    found_curves = curves()
    if parser.parse_args().write:
        PLOT.write_text(svg(found_curves))
    print(table(found_curves))
