# SPDX-License-Identifier: Apache-2.0
"""Writes the comparison table: one row per part, with the ratio of the part's time to this
project's time on the same GPU.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.peers.parts import BASELINES, PARTS

HEAD = ("part", "engine", "chunk, ms", "ratio to ours", "frames/s", "first chunk, ms", "peak, GB")


class TableError(Exception):
    """Raised for results that cannot be compared with each other."""


def load(folders: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Read the results of each part. Each folder contains the results of one start.

    Raises:
        TableError: There are no results, or they come from more than one GPU.
    """
    starts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        document = json.loads(path.read_text())
        if "part" in document.get("result", {}):
            starts[document["result"]["part"]].append(document)
            files[gpu_of(document)].append(path.name)
    if not starts:
        raise TableError(f"no results of parts in {', '.join(map(str, folders))}")
    if len(files) > 1:
        described = "; ".join(f"{gpu}: {', '.join(names)}" for gpu, names in files.items())
        raise TableError(
            f"results of {len(files)} GPUs cannot be compared ({described}). Put the results of "
            "one GPU into a folder."
        )
    return starts


def gpu_of(document: dict[str, Any]) -> str:
    """Return the name and the unique id of each GPU. The id is included because two GPUs of the
    same model can differ in speed.
    """
    hardware = document["hardware"]
    gpus = zip(hardware["gpus"], hardware["gpu_ids"], strict=True)
    return ", ".join(f"{name} ({identity})" for name, identity in gpus) or "CPU"


def table_text(starts: dict[str, list[dict[str, Any]]]) -> str:
    """Return the comparison as Markdown, with one heading and table per model and the fastest rows
    first.
    """
    medians = {
        part: statistics.median(found["result"]["chunk_ms"] for found in documents)
        for part, documents in starts.items()
    }
    (gpu,) = {gpu_of(found) for documents in starts.values() for found in documents}
    parts = [f"GPU: {gpu}"]
    for model, baseline in BASELINES.items():
        rows = sorted((p for p in starts if PARTS[p].model == model), key=medians.__getitem__)
        if not rows:
            continue
        lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        lines += [row_text(part, starts[part], medians, baseline) for part in rows]
        parts.append(f"## {model}\n\n" + "\n".join(lines))
        replaced = {starts[part][0]["result"]["peer"]: starts[part] for part in rows}
        for peer, documents in replaced.items():
            items = documents[0]["result"].get("replaced") or []
            parts += [f"{peer}: {'; '.join(items)}."] if items else []
    return "\n\n".join(parts) + "\n"


def row_text(
    part: str, documents: list[dict[str, Any]], medians: dict[str, float], baseline: str
) -> str:
    results = [document["result"] for document in documents]
    chunk = f"{medians[part]:.0f} ({chunk_range(results)})"
    ratio = f"{medians[part] / medians[baseline]:.2f}" if baseline in medians else ""
    rate = f"{results[0]['frames_per_chunk'] / medians[part] * 1e3:.2f}"
    cells = [part, results[0]["peer"], chunk, ratio, rate]
    for key, decimals in (("first_chunk_ms", 0), ("peak_memory_gb", 1)):
        values = [result[key] for result in results if result.get(key) is not None]
        cells.append(f"{statistics.median(values):.{decimals}f}" if values else "")
    return "| " + " | ".join(cells) + " |"


def chunk_range(results: list[dict[str, Any]]) -> str:
    """Return the range of one start's chunk times, or of several starts' medians."""
    ends = results[0]["chunk_ms_range"]
    if len(results) > 1:
        ends = [result["chunk_ms"] for result in results]
    text = f"{min(ends):.0f} to {max(ends):.0f}"
    return text if len(results) == 1 else f"{text}, {len(results)} starts"
