# SPDX-License-Identifier: Apache-2.0
"""Compares a model with golden tensors from its original implementation: `vllm-omni verify MODEL
--golden DIR`.

A family maps file names to functions that run a scenario. This module finds the files, runs the
scenarios, records the largest difference and the tolerance of each stage, and creates the report.
The comparison fails if a file is unknown, a scenario raises an exception, a recorded tensor was not
compared, a result contains NaN, or the directory has no scenarios.
"""

import fnmatch
import json
import logging
import lzma
import math
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_omni.model_executor.layers.collectives.parallel import CheckpointSlot

logger = logging.getLogger(__name__)


@dataclass
class ComparisonRow:
    """Result of one stage of one scenario."""

    scenario: str
    """Name of the scenario: the file name without its suffix."""
    stage: str
    """Name of the compared stage."""
    tolerance: float
    """Largest accepted difference."""
    max_abs_diff: float = 0.0
    """Largest absolute difference over all compared tensors. Infinite for NaN."""
    compared: int = 0
    """Number of compared tensors."""
    error: str | None = None
    """Reason why the scenario could not be run, or None if it was run."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.compared > 0 and self.max_abs_diff <= self.tolerance


@dataclass
class ComparisonReport:
    """Results of comparing a model with one directory of golden files."""

    model: str
    """Name of the model family."""
    golden: str
    """Directory of the golden files."""
    rows: list[ComparisonRow] = field(default_factory=list)
    """One entry for each stage of each scenario."""

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_json(self) -> str:
        """Return the report as one JSON object: `{"model", "golden", "ok", "rows": [...]}`.

        `max_abs_diff` is null if the difference is not finite.
        """
        rows = [
            {
                "scenario": row.scenario,
                "stage": row.stage,
                "max_abs_diff": row.max_abs_diff if math.isfinite(row.max_abs_diff) else None,
                "tolerance": row.tolerance,
                "compared": row.compared,
                "ok": row.ok,
                "error": row.error,
            }
            for row in self.rows
        ]
        return json.dumps(
            {"model": self.model, "golden": self.golden, "ok": self.ok, "rows": rows}, indent=2
        )

    def to_text(self) -> str:
        """Return the report as a table with one line per stage, and the overall result in the last
        line.
        """
        left = max((len(row.scenario) for row in self.rows), default=8)
        middle = max((len(row.stage) for row in self.rows), default=5)
        lines = [
            f"{'scenario':<{left}} {'stage':<{middle}} {'max abs diff':>12} "
            f"{'tolerance':>9}  result"
        ]
        for row in self.rows:
            name = f"{row.scenario:<{left}} {row.stage:<{middle}}"
            if row.error is not None:
                lines.append(f"{name} could not be run: {row.error}")
                continue
            verdict = "ok" if row.ok else "OVER"
            lines.append(f"{name} {row.max_abs_diff:>12.3e} {row.tolerance:>9.1e}  {verdict}")
        scenarios = {row.scenario for row in self.rows}
        failed = {row.scenario for row in self.rows if not row.ok}
        if not self.rows:
            lines.append(f"FAILED: {self.golden} holds no scenario of {self.model}")
        elif failed:
            lines.append(
                f"FAILED: {len(failed)} of {len(scenarios)} scenarios: {', '.join(sorted(failed))}"
            )
        else:
            lines.append(
                f"OK: {len(scenarios)} scenarios, {len(self.rows)} stages within tolerance"
            )
        return "\n".join(lines)


class GoldenScenario:
    """A golden file that is being compared.

    Every tensor in the file must be read with `get`. If a tensor was not read, `finish` fails the
    scenario.

    Args:
        path: Path of the golden file. Only safetensors files have tensors and metadata.
        report: Report that receives the results of the scenario.
    """

    def __init__(self, path: Path, report: ComparisonReport) -> None:
        self.path = path
        self.directory = path.parent
        self.name = path.stem
        self.report = report
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._untaken: set[str] = set()
        if path.suffix == ".safetensors":
            self.tensors, self.metadata = read_tensors(path)
            self._untaken = set(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> torch.Tensor:
        """Return a recorded tensor.

        Raises:
            ValueError: The file has no tensor with this name.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path.name} has no tensor {name!r}")
        self._untaken.discard(name)
        return self.tensors[name]

    def meta(self, key: str) -> str:
        """Return a metadata value.

        Raises:
            ValueError: The metadata of the file has no such key.
        """
        if key not in self.metadata:
            raise ValueError(f"{self.path.name} has no metadata {key!r}")
        return self.metadata[key]

    def compare(
        self, stage: str, ours: torch.Tensor, recorded: torch.Tensor, tolerance: float
    ) -> None:
        """Compare two tensors, and record the largest absolute difference for a stage.

        Args:
            stage: Name of the stage that the tensors belong to.
            ours: Tensor computed by this package.
            recorded: Tensor recorded from the original implementation.
            tolerance: Largest accepted difference.

        Raises:
            ValueError: The shapes differ, or the tensors are empty.
        """
        if ours.shape != recorded.shape:
            raise ValueError(
                f"{stage}: shape {tuple(ours.shape)} against recorded {tuple(recorded.shape)}"
            )
        if recorded.numel() == 0:
            raise ValueError(f"{stage}: the recorded tensor is empty")
        difference = float((ours.double().cpu() - recorded.double()).abs().max())
        row = self._row(stage, tolerance)
        row.max_abs_diff = max(row.max_abs_diff, math.inf if math.isnan(difference) else difference)
        row.compared += 1

    def compare_recorded(self, stage: str, ours: torch.Tensor, name: str, tolerance: float) -> None:
        """Compare a tensor with the recorded tensor `name`."""
        self.compare(stage, ours, self.get(name), tolerance)

    def compare_relative(self, stage: str, ours: torch.Tensor, name: str, tolerance: float) -> None:
        """Compare a tensor with the recorded tensor `name` by relative L2 distance."""
        recorded = self.get(name)
        if ours.shape != recorded.shape:
            raise ValueError(
                f"{stage}: shape {tuple(ours.shape)} against recorded {tuple(recorded.shape)}"
            )
        error = (ours.double() - recorded.double()).norm() / recorded.double().norm()
        self.compare(f"{stage}, relative", error, torch.zeros_like(error), tolerance)

    def compare_names(self, stage: str, recorded: Mapping[str, Any], wrong: Sequence[str]) -> None:
        """Record a stage in which all names match the recorded names.

        Raises ValueError if `wrong` contains names, or if no names were recorded.
        """
        if wrong or not recorded:
            raise ValueError(
                f"{len(wrong)} of {len(recorded)} names are mapped differently: "
                f"{', '.join(wrong[:3])}"
            )
        count = torch.tensor(len(recorded))
        self.compare(stage, count, count, 0.0)

    def finish(self) -> None:
        """Check that the scenario is complete.

        Raises:
            ValueError: A recorded tensor was not read, or no tensor was compared.
        """
        if self._untaken:
            left = sorted(self._untaken)
            raise ValueError(
                f"{len(left)} recorded tensors were not compared: {', '.join(left[:3])}"
            )
        if not any(row.scenario == self.name and row.compared for row in self.report.rows):
            raise ValueError("the file contains nothing to compare")

    def _row(self, stage: str, tolerance: float) -> ComparisonRow:
        for row in self.report.rows:
            if (row.scenario, row.stage) == (self.name, stage):
                row.tolerance = max(row.tolerance, tolerance)
                return row
        row = ComparisonRow(self.name, stage, tolerance)
        self.report.rows.append(row)
        return row


Runner = Callable[[GoldenScenario], None]


def run_scenarios(
    model: str,
    directory: Path,
    runners: Mapping[str, Runner],
    auxiliary: Iterable[str] = ("README*", ".*"),
) -> ComparisonReport:
    """Run all scenarios in a directory. If a scenario raises an error, the report contains an entry
    with the error.

    Args:
        model: Name of the model family.
        directory: Directory with the golden files.
        runners: Functions that run a scenario, keyed by file name pattern. The first matching
            pattern is used.
        auxiliary: Patterns of files that are not scenarios.
    """
    report = ComparisonReport(model, str(directory))
    auxiliary = tuple(auxiliary)
    for path in sorted(directory.iterdir()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in auxiliary):
            continue
        runner = next(
            (run for pattern, run in runners.items() if fnmatch.fnmatch(path.name, pattern)), None
        )
        try:
            if runner is None:
                raise ValueError("no scenario of this model has such a file name")
            scenario = GoldenScenario(path, report)
            with torch.no_grad():
                runner(scenario)
            scenario.finish()
        # boundary: an error in one file must not stop the comparison of the others
        except Exception as error:
            logger.debug("%s failed", path, exc_info=True)
            text = " ".join(str(error).split()) or "no message"
            report.rows.append(
                ComparisonRow(path.stem, "run", 0.0, error=f"{type(error).__name__}: {text}")
            )
    return report


def unpack_golden(source: Path, target: Path) -> None:
    """Copy the golden files in `source` to the empty folder `target`. Compressed files (`*.xz`) are
    decompressed, and archives (`*.tar.xz`) are extracted.
    """
    for path in source.iterdir():
        if path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
        elif path.suffix == ".xz":
            (target / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        elif path.is_file():
            shutil.copy(path, target)


def check_recorded(
    name: str, values: Mapping[str, Any], known: Collection[str]
) -> Mapping[str, Any]:
    """Check that all keys in a network's recorded configuration are known, and return the
    configuration.

    Args:
        name: Name of the configuration, for the error message.
        values: The recorded configuration.
        known: Keys that the comparison uses, or that do not affect its result.

    Raises:
        ValueError: A key is unknown, so the recorded model could differ from the compared one.
    """
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{name} has unknown settings: {', '.join(unknown[:3])}")
    return values


def fill_slots(
    slots: Mapping[str, CheckpointSlot], weights: Mapping[str, torch.Tensor], where: str
) -> None:
    """Load recorded weights into a model.

    Args:
        slots: Result of `checkpoint_slots` for the model.
        weights: Recorded tensors, keyed by the same names as `slots`.
        where: Name of the file, for error messages.

    Raises:
        ValueError: A tensor is missing, unexpected or misshapen.
    """
    if slots.keys() != weights.keys():
        raise ValueError(
            f"{where}: names differ from the model's: {sorted(slots.keys() ^ weights.keys())[:3]}"
        )
    for name, slot in slots.items():
        try:
            slot.load(weights[name])
        except ValueError as error:
            raise ValueError(f"{where}: {name} {error}") from error


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(  # noqa: SIM118
                file.metadata() or {}
            )
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path.name} can not be read as safetensors ({type(error).__name__})"
        ) from error
