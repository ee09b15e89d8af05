# SPDX-License-Identifier: Apache-2.0
"""The results of record, as data of the package, and comparison of new measurements with them.

`make results` writes `baselines.json` from `benchmarks/results`. `vllm-omni bench --check` repeats
some of them.
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
"""GPUs of the same model differ by up to this fraction."""
CPU_TOLERANCE: Final = 0.25
"""Processor time of the same work differs by up to this fraction, for example due to the clock of
the cores and other programs on them.
"""

Verdict = Literal["within", "faster", "slower", "other hardware"]


class BaselineValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One column of a row."""

    name: str
    """Quantity with its unit, as in docs/reference/results.md."""
    starts: tuple[float | str, ...]
    """One value for each run of the command."""


class BaselineCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a row is repeated."""

    script: str
    """Name of the benchmark."""
    arguments: tuple[str, ...]
    """Arguments of the recorded command."""
    number: str
    """Key of the measured number in the benchmark's `result`. Smaller is better."""
    value: str
    """Name of the same metric in `Baseline.values`."""


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One result of record."""

    name: str
    """Name of the result file without suffix."""
    row: str
    """What was measured."""
    date: str
    """Day of the measurement."""
    commit: str
    """Commit that recorded the result."""
    command: str
    """Command that was measured."""
    cpu: str
    """Model of the host's CPU. Empty: not recorded."""
    cores: int
    """CPU cores that the command could use. 0: not recorded."""
    gpu: str | None
    """Kind of GPU, for example "H200". None: measured on a CPU."""
    gpus: int
    """Number of GPUs that were used."""
    values: tuple[BaselineValue, ...]
    """The measured values."""
    check: BaselineCheck | None = None
    """How to repeat the row. None: the check takes too long, or needs more than one GPU."""

    @property
    def hardware(self) -> str:
        """The hardware, for example `1 x H200` or `2 cores of AMD EPYC`."""
        return f"{self.gpus} x {self.gpu}" if self.gpu else f"{self.cores} cores of {self.cpu}"

    def median(self, value: str) -> float | None:
        """Return the median of a column over the runs, or None if it is not numeric."""
        for one in self.values:
            if one.name == value:
                numbers = [float(start) for start in one.starts if not isinstance(start, str)]
                return statistics.median(numbers) if numbers else None
        return None


class Machine(msgspec.Struct, frozen=True):
    """The machine that runs this process."""

    cpu: str
    """Model of the CPU."""
    cores: int
    """CPU cores that this process may use."""
    gpu: str | None = None
    """Kind of the first GPU. None: no GPU."""
    gpu_bytes: int = 0
    """Memory of the first GPU."""


class Comparison(msgspec.Struct, frozen=True):
    """A repeated row."""

    name: str
    """Name of the row."""
    row: str
    """What was measured."""
    recorded: float
    """Median of the record, ms."""
    measured: float
    """The new measurement, ms."""
    ratio: float
    """Measured divided by recorded; above 1 is slower."""
    same_hardware: bool
    """Whether the record is of the same kind of GPU, or of the same CPU and number of cores."""
    tolerance: float
    """Maximum deviation from 1 that counts as equal."""
    verdict: Verdict
    """`other hardware`: the ratio does not allow conclusions about this installation."""


def gpu_kind(name: str) -> str:
    """Return the kind of a GPU from its device name: "H100" for "NVIDIA H100 80GB HBM3"."""
    return re.sub(r"NVIDIA | \d+GB.*", "", name)


@cache
def all_baselines() -> tuple[Baseline, ...]:
    """Return every row of the file."""
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
    """Return the rows to repeat.

    Args:
        machine: The machine that runs this process. Rows measured on GPUs are only for machines
            with a GPU.
        names: Names of rows. None: for each benchmark, the first row of the same hardware whose
            memory fits, or otherwise the first row that fits, so that a check takes minutes.
        rows: All rows (default: those of the package).

    Raises:
        KeyError: A name is unknown, or its row cannot be repeated on such a machine.
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
    """Compare the result file of a repeated benchmark with its row.

    Raises:
        KeyError: The result does not contain the metric.
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
