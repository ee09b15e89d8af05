# SPDX-License-Identifier: Apache-2.0
"""The baselines (benchmark results shipped with the package), and the comparison of new
measurements with the baselines.

`make results` writes `baselines.json` from `benchmarks/results`. `vllm-omni bench --check` repeats
some of the benchmarks.
"""

import re
import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

import msgspec

_FILE: Final = "baselines.json"
GPU_TOLERANCE: Final = 0.06
"""Largest accepted difference in speed between two GPUs of the same model, as a fraction."""
CPU_TOLERANCE: Final = 0.25
"""Largest accepted difference in CPU time for the same work, as a fraction. CPU time depends, for
example, on the cores' clock rate and on other programs that run on the cores.
"""

Verdict = Literal["within", "faster", "slower", "other hardware"]


class BaselineValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured quantity in a baseline."""

    name: str
    """Name of the quantity with its unit, as in docs/reference/results.md."""
    starts: tuple[float | str, ...]
    """Measured values, one for each run of the command."""


class BaselineCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to repeat a baseline measurement."""

    script: str
    """Name of the benchmark."""
    arguments: tuple[str, ...]
    """Arguments of the recorded command."""
    number: str
    """Key of the compared metric in the benchmark's `result`. Smaller values are better."""
    value: str
    """Name of the compared metric in `Baseline.values`."""


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One recorded benchmark result."""

    name: str
    """Name of the result file without its suffix."""
    row: str
    """Description of what was measured."""
    date: str
    """Day of the measurement."""
    commit: str
    """Commit that recorded the result."""
    command: str
    """Measured command."""
    cpu: str
    """CPU model of the host; empty if the model was not recorded."""
    cores: int
    """Number of CPU cores that the command could use; 0 if the number was not recorded."""
    gpu: str | None
    """Kind of GPU, for example "H200". None if the result was measured on a CPU."""
    gpus: int
    """Number of GPUs used."""
    values: tuple[BaselineValue, ...]
    """The measured quantities."""
    check: BaselineCheck | None = None
    """How to repeat the measurement, or None if it takes too long for a check or needs more than
    one GPU."""

    @property
    def hardware(self) -> str:
        """Description of the hardware, for example `1 x H200` or `2 cores of AMD EPYC`."""
        return f"{self.gpus} x {self.gpu}" if self.gpu else f"{self.cores} cores of {self.cpu}"

    def median(self, value: str) -> float | None:
        """Return the median of a quantity over all runs, or None if the quantity is not numeric."""
        for one in self.values:
            if one.name == value:
                numbers = [float(start) for start in one.starts if not isinstance(start, str)]
                return statistics.median(numbers) if numbers else None
        return None


class Machine(msgspec.Struct, frozen=True):
    """The machine that runs this process."""

    cpu: str
    """CPU model."""
    cores: int
    """Number of CPU cores that this process can use."""
    gpu: str | None = None
    """Kind of the first GPU, or None if the machine has no GPU."""
    gpu_bytes: int = 0
    """Memory of the first GPU in bytes."""


class Comparison(msgspec.Struct, frozen=True):
    """Comparison of a repeated measurement with its baseline."""

    name: str
    """Name of the baseline."""
    row: str
    """Description of what was measured."""
    recorded: float
    """Median of the recorded values, in milliseconds."""
    measured: float
    """Newly measured value, in milliseconds."""
    ratio: float
    """Measured value divided by recorded value. If the ratio is above 1, this machine is slower."""
    same_hardware: bool
    """Whether the baseline was recorded on the same kind of GPU, or on the same CPU with the same
    number of cores."""
    tolerance: float
    """Largest difference between the ratio and 1 for the two values to count as equal."""
    verdict: Verdict
    """Result of the comparison. `other hardware` means that the ratio says nothing about this
    installation."""


def gpu_kind(name: str) -> str:
    """Return the kind of a GPU from its device name: "H100" for "NVIDIA H100 80GB HBM3"."""
    return re.sub(r"NVIDIA | \d+GB.*", "", name)


@cache
def all_baselines() -> tuple[Baseline, ...]:
    """Return all baselines in the package."""
    return msgspec.json.decode(
        files(__package__).joinpath(_FILE).read_bytes(), type=tuple[Baseline, ...]
    )


def is_same_hardware(row: Baseline, machine: Machine) -> bool:
    if row.gpu is not None or machine.gpu is not None:
        return row.gpu == machine.gpu
    return (row.cpu, row.cores) == (machine.cpu, machine.cores)


def choose_rows(
    machine: Machine, names: Iterable[str] = (), rows: Iterable[Baseline] | None = None
) -> list[Baseline]:
    """Choose the baselines to repeat.

    Only baselines that fit this machine are considered. A baseline measured on a GPU requires a GPU
    with enough memory. All other baselines require a machine without a GPU.

    Args:
        machine: The machine that runs this process.
        names: Names of the baselines to repeat. If empty, one baseline is chosen for each
            benchmark, so that a check takes only minutes: the first baseline recorded on the same
            hardware, or if there is none, the first one that fits.
        rows: Baselines to choose from. Default: all baselines in the package.

    Raises:
        KeyError: A name is unknown, or its baseline cannot be repeated on this machine.
    """
    fitting = {
        row.name: row
        for row in (all_baselines() if rows is None else rows)
        if row.check is not None
        and (row.gpu is None) == (machine.gpu is None)
        and 1e9 * (row.median("peak memory, GB") or 0) <= machine.gpu_bytes
    }
    if names := list(names):
        return [fitting[name] for name in names]
    chosen: dict[str, Baseline] = {}
    for same in (True, False):
        for row in fitting.values():
            assert row.check is not None
            if is_same_hardware(row, machine) == same:
                chosen.setdefault(row.check.script, row)
    return list(chosen.values())


def compare_result(row: Baseline, document: Mapping[str, Any], machine: Machine) -> Comparison:
    """Compare the result file of a repeated benchmark with its baseline.

    Raises:
        KeyError: The result does not contain the compared metric.
    """
    assert row.check is not None
    recorded = row.median(row.check.value)
    assert recorded is not None
    measured = float(document["result"][row.check.number])
    ratio, same = round(measured / recorded, 3), is_same_hardware(row, machine)
    tolerance = CPU_TOLERANCE if row.gpu is None else GPU_TOLERANCE
    verdict: Verdict = "within"
    if not same:
        verdict = "other hardware"
    elif round(abs(ratio - 1), 3) > tolerance:
        verdict = "slower" if ratio > 1 else "faster"
    return Comparison(row.name, row.row, recorded, measured, ratio, same, tolerance, verdict)
