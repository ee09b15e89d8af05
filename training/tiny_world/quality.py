# SPDX-License-Identifier: Apache-2.0
"""The quality page: what each option costs and gives, by `score.py` on the same held-out walks.

    python -m training.tiny_world.quality --model DIR --out DIR --walks 24 --chunks 100 --page
    quality.md

Every variant is measured as `score.py` does against a truth that is rendered once, and is one file
in --out; a result that is there already, of the same walks, options and model, is not made again,
so the command may be stopped and started, several may run at once with --only, and what needs more
devices than there are may be made elsewhere. --page writes the page and its plot (SVG), unless a
variant is missing.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from training.tiny_world import score
from training.tiny_world.truth import Truth

VARIANTS: dict[str, tuple[str, ...]] = {
    "as shipped": (),
    "exact decoder": ("--decoder", "wan"),
    "2 steps": ("--steps", "2"),
    "1 step": ("--steps", "1"),
    "window 12": ("--window", "12"),
    "window 9": ("--window", "9"),
    "no sink": ("--sink", "0"),
    "bfloat16": ("--dtype", "bfloat16"),
    "float16": ("--dtype", "float16"),
    # the model's own chunks are one latent frame
    "snapshot every 10 chunks": ("--snapshot-every", "30"),
    "as SGLang serves it": ("--model-options", '{"convention": "sglang"}'),
}
"""Name -> arguments of `score.py`; the world is shipped with the tiny decoder, 4 steps, window 18,
sink 3, and runs in fp32 unless a row says otherwise. What a late chunk may go without
(`degradations`), here every chunk goes without. `vae_parallel` needs no row: it gives the exact
decoder's frames, to rounding."""
SHOWN = (1, 5, 20, 100)
LOSSES = {
    "PSNR": 1.0,
    "sharpness": 0.1,
    "turn": 0.1,
    "step": 0.02,
    "style": 0.1,
    "return": 1.0,
    "level": 0.1,
}
"""How much worse than as shipped is a loss: in dB, of the truth's, of the command (twice), of the
walks, in dB, of 2. Three times what the row that changes no arithmetic (snapshots) differs by, or
more."""
_COLOURS = [
    "#1b6ca8",
    "#c0392b",
    "#27824f",
    "#8e44ad",
    "#b9770e",
    "#117a8b",
    "#7f8c8d",
    "#d35400",
    "#2c3e50",
    "#e377c2",
    "#000000",
]


def arguments(args: argparse.Namespace, name: str) -> list[str]:
    """What decides a variant's result, as arguments of `score.py`."""
    common = (
        "--seed",
        args.seed,
        "--walks",
        args.walks,
        "--chunks",
        args.chunks,
        "--dtype",
        "float32",
    )
    return [str(value) for value in (*common, *VARIANTS[name])]


def command(args: argparse.Namespace, name: str) -> list[str]:
    """The whole command line of a variant's run."""
    batch = math.ceil(args.walks / args.engines)
    run = ("--model", args.model, "--engines", args.engines, "--batch", batch)
    share = ("--gpu-memory-utilization", args.gpu_memory_utilization)
    return [*arguments(args, name), "--json", *(str(value) for value in (*run, *share))]


def digest_of(model: Path) -> str:
    """Names the weights that a result is of; card and pictures beside them may change."""
    digest = hashlib.sha256()
    for path in sorted(
        path for path in model.rglob("*") if path.suffix in (".safetensors", ".pth")
    ):
        digest.update(path.relative_to(model).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kept(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """A run's result if it is there and was made with the same `key`."""
    if not path.exists():
        return None
    saved = json.loads(path.read_text())
    return saved["result"] if saved["key"] == dict(key) else None


def run_all(args: argparse.Namespace, out: TextIO) -> dict[str, Any]:
    """Make what is missing, a line each to `out`; returns the results by variant."""
    args.out.mkdir(parents=True, exist_ok=True)
    weights, results = digest_of(args.model), {}
    truth: Truth | None = None
    for name in args.only or VARIANTS:
        path = args.out / f"{name.replace(' ', '_')}.json"
        # wherever model and engines are
        key = {"weights": weights, "arguments": arguments(args, name)}
        result = kept(path, key)
        if result is None:
            options = score.make_parser().parse_args(command(args, name))
            truth = truth or score.make_truth(options)
            result = score.run(options, truth)
            path.write_text(json.dumps({"key": key, "result": result}))
        results[name] = result
        print(f"{name}: {row(result)}", file=out, flush=True)
    return {
        "weights": weights,
        "walks": args.walks,
        "chunks": args.chunks,
        "seed": args.seed,
        "variants": results,
    }


def shown(chunks: int) -> list[int]:
    return [chunk for chunk in SHOWN if chunk <= chunks]


def row(result: Mapping[str, Any]) -> list[str]:
    """A line of the table: PSNR / sharpness by chunk, turn, step, styles, return, level."""
    by_chunk = [
        f"{result['psnr'][chunk - 1]:.1f} / {result['sharpness'][chunk - 1]:.2f}"
        for chunk in shown(result["chunks"])
    ]
    return [
        *by_chunk,
        f"{result['turn']['ratio']:.3f} ({result['turn']['wrong_sign']})",
        f"{result['step']['ratio']:.3f}",
        f"{result['style'][0]:.0%}, {result['switch']['share'][1]:.0%}",
        f"{result['loop']['psnr']:.1f}",
        f"{result['level']['largest']:.2f}",
    ]


def measures(result: Mapping[str, Any]) -> dict[str, tuple[str, float, float]]:
    """By what is measured: its key in `LOSSES`, the value, and how far it is from perfect (only
    differences count).
    """
    by_chunk: dict[str, tuple[str, float, float]] = {}
    for chunk in shown(result["chunks"]):
        psnr, sharpness = result["psnr"][chunk - 1], result["sharpness"][chunk - 1]
        by_chunk[f"PSNR at chunk {chunk}"] = ("PSNR", psnr, -psnr)
        by_chunk[f"sharpness at chunk {chunk}"] = ("sharpness", sharpness, abs(sharpness - 1))
    turn, step, level = result["turn"]["ratio"], result["step"]["ratio"], result["level"]["largest"]
    first, after = result["style"][0], result["switch"]["share"][1]
    return by_chunk | {
        "turn": ("turn", turn, abs(turn - 1)),
        "step": ("step", step, abs(step - 1)),
        "style": ("style", first, -first),
        "style after a switch": ("style", after, -after),
        "return": ("return", result["loop"]["psnr"], -result["loop"]["psnr"]),
        "level": ("level", level, level),
    }


def losses(result: Mapping[str, Any], shipped: Mapping[str, Any]) -> list[str]:
    """What is worse than `shipped` by more than `LOSSES`, each with both values."""
    return [
        f"{name} {value:.2f} for {other:.2f}"
        for (name, (key, value, loss)), (_, other, before) in zip(
            measures(result).items(), measures(shipped).values(), strict=True
        )
        if loss - before > LOSSES[key]
    ]


def page(quality: Mapping[str, Any], plot: str) -> str:
    """The page's text.

    Raises ValueError while a variant is missing: half a comparison is not published.
    """
    missing = [name for name in VARIANTS if name not in quality["variants"]]
    if missing:
        raise ValueError(f"no result yet of: {', '.join(missing)}")
    some = quality["variants"]["as shipped"]
    chunks = [f"chunk {chunk}" for chunk in shown(quality["chunks"])]
    heads = ["", *chunks, "turn (wrong)", "step", "style, after a switch", "return", "level"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, result in quality["variants"].items():
        elsewhere = "" if result["device"] == some["device"] else f" (on {result['device']})"
        lines.append("| " + " | ".join([name + elsewhere, *row(result)]) + " |")
    worse = {
        name: losses(result, some)
        for name, result in quality["variants"].items()
        if name != "as shipped"
    }
    return "\n".join(
        [
            "# Quality of the options, on the village",
            "",
            f"The test set is {quality['walks']} walks of {quality['chunks']} chunks (seed "
            f"{quality['seed']}), {some['size'][0]}x{some['size'][1]}, on {some['device']}, "
            f"weights `{quality['weights']}`. None of them was in the training data. Every row "
            "uses the same walks and changes one option. As shipped means the tiny decoder, 4 "
            "steps, a window of 18 latent frames and 3 sink frames, in fp32.",
            "",
            *lines,
            "",
            f"![PSNR and sharpness by chunk]({plot})",
            "",
            "These values are worse than as shipped by more than the difference between repeated "
            "runs:",
            "",
            *(f"- {name}: {', '.join(found)}" for name, found in worse.items() if found),
            "",
            "No worse in any column: "
            f"{', '.join(name for name, found in worse.items() if not found)}.",
            "",
            "The columns:",
            "",
            "- Chunk N: PSNR in dB against the rendered ground truth / sharpness relative to the "
            "ground truth. PSNR rewards blur.",
            "- Turn: median ratio of the rotation by a held look key to the commanded 6 degrees; "
            "in parentheses, the number of latent frames that turned in the wrong direction. "
            "Step: the same ratio for the key `w`.",
            "- Style: share of walks with the mean colour of their prompt's style, at chunk 1 and "
            "two chunks after a new prompt.",
            "- Return: PSNR after the camera has turned away for 6 latent frames and back. Level: "
            "largest difference of the mean colour from the style's over the last tenth of the "
            "chunks, in a range of 2.",
            "- `vae_parallel` has no row, because ranks that decode a frame in bands return the "
            "exact decoder's frames up to rounding "
            "(tests/model_executor/models/wan/test_split_decode.py).",
            "",
            "Generated by `python -m training.tiny_world.quality`. "
            "[Its results](../../training/tiny_world/curves/quality) have every value.",
            "",
        ]
    )


def svg(quality: Mapping[str, Any], names: Sequence[str]) -> str:
    """PSNR (left) and sharpness (right) by chunk, a line a variant."""
    width, height, gap = 360, 220, 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (width + gap)} '
        f'{height + 90 + 16 * len(names)}">'
    ]
    parts.append(
        "<style>text{font:12px sans-serif;fill:#444}path{fill:none;stroke-width:1.5}</style>"
    )
    for panel, (key, top) in enumerate((("psnr", 32.0), ("sharpness", 1.2))):
        left = gap + panel * (width + gap)
        parts.append(f'<text x="{left}" y="18">{key} by chunk</text>')
        for part in range(5):
            y = 30 + height * (1 - part / 4)
            parts.append(f'<path d="M{left} {y}h{width}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 34}" y="{y + 4}">{top * part / 4:.3g}</text>')
        for index, name in enumerate(names):
            values = quality["variants"][name][key]
            step = width / max(len(values) - 1, 1)
            points = [
                f"{left + step * at:.1f} {30 + height * (1 - min(value, top) / top):.1f}"
                for at, value in enumerate(values)
            ]
            parts.append(
                f'<path d="M{" L".join(points)}" stroke="{_COLOURS[index % len(_COLOURS)]}"/>'
            )
        parts.append(f'<text x="{left}" y="{height + 48}">1</text>')
        parts.append(f'<text x="{left + width - 20}" y="{height + 48}">{quality["chunks"]}</text>')
    for index, name in enumerate(names):
        y = height + 72 + 16 * index
        parts.append(f'<path d="M{gap} {y - 4}h24" stroke="{_COLOURS[index % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{gap + 32}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of results, one file a variant"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--walks", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument(
        "--engines",
        type=int,
        default=1,
        help="walks of a variant are shared out to so many engines",
    )
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="variants to run now")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.6,
        help="of each run: several may share a GPU",
    )
    parser.add_argument(
        "--page", type=Path, help="Markdown file to write; its plot (SVG) lies beside it"
    )
    args = parser.parse_args()
    quality = run_all(args, score.own_stdout())
    if args.page is not None:
        plot = args.page.with_suffix(".svg")
        text = page(quality, plot.name)
        args.page.write_text(text)
        plot.write_text(svg(quality, list(VARIANTS)))


if __name__ == "__main__":
    main()
