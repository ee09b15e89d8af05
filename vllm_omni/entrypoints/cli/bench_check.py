# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni bench --check`: repeat recorded benchmarks on this machine and compare the results.

The package includes the recorded results and the benchmarks, so an installation can be checked
without a checkout of the repository.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.planning.baselines import (
    Baseline,
    Comparison,
    Machine,
    all_baselines,
    choose_rows,
    compare_result,
    gpu_kind,
)

_LIMIT_S = 900.0
"""Time limit in seconds for one repeated benchmark."""
_LOG_LINES_SHOWN = 15


def run(folder: Path, names: Sequence[str], as_json: bool) -> int:
    """Repeat recorded benchmarks on this machine, and print a comparison with the recorded results.

    Args:
        folder: Folder that contains the benchmarks.
        names: Names of the recorded results to repeat. If empty, one result is repeated for each
            benchmark that fits this machine.
        as_json: Whether to print only a JSON list.

    Returns:
        1 if a benchmark failed or was slower, by more than the tolerance, than the result recorded
        on the same hardware; otherwise 0.

    Raises:
        CommandError: No recorded result fits this machine, or a name is unknown.
    """
    machine = machine_at_hand()
    try:
        rows = choose_rows(machine, names)
    except KeyError as error:
        known = [row.name for row in all_baselines() if row.check is not None]
        raise CommandError(
            f"no row {error} can be repeated on this machine; rows with a check: {', '.join(known)}"
        ) from error
    if not rows:
        raise CommandError("no recorded result fits this machine")
    title = machine.gpu or f"{machine.cores} cores of {machine.cpu}"
    print(f"this machine: {title}; rows: {len(rows)}", file=sys.stderr)
    compared, failed = [], []
    for row in rows:
        document = _repeat(folder, row)
        if document is None:
            failed.append(row.name)
            continue
        comparison = compare_result(row, document, machine)
        compared.append(comparison)
        if not as_json:
            print(describe(row, comparison), flush=True)
    if as_json:
        print(json.dumps({"rows": msgspec.to_builtins(compared), "failed": failed}, indent=2))
    return 1 if failed or any(one.verdict == "slower" for one in compared) else 0


def describe(row: Baseline, found: Comparison) -> str:
    """Return the output lines that compare one repeated benchmark with its recorded result."""
    card = "same hardware" if found.same_hardware else "other hardware"
    share = f"{100 * found.tolerance:.0f} %"
    verdict = {
        "within": f"within {share}",
        "faster": f"faster than recorded by more than {share}",
        "slower": f"SLOWER than recorded by more than {share}",
        "other hardware": "not comparable",
    }[found.verdict]
    check = row.check
    assert check is not None
    return (
        f"{row.row}\n"
        f"    {check.number}: {found.measured:.1f}, recorded {found.recorded:.1f} on "
        f"{row.hardware} ({row.date}); ratio {found.ratio:.3f}; {card}; {verdict}"
    )


def _repeat(folder: Path, row: Baseline) -> dict[str, Any] | None:
    """Run the benchmark for a recorded result. If it fails, print a message and return None."""
    check = row.check
    assert check is not None
    with tempfile.TemporaryDirectory() as out:
        log = Path(out) / "log.txt"
        command = [sys.executable, str(folder / f"{check.script}.py"), *check.arguments]
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    [*command, "--out", out],
                    stdout=output,
                    stderr=output,
                    timeout=_LIMIT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        results = sorted(Path(out).glob("*.json"))
        if status == 0 and results:
            document: dict[str, Any] = json.loads(results[0].read_text())
            return document
        what = f"took more than {_LIMIT_S:.0f} s" if status is None else f"ended with {status}"
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        text = "\n".join(f"    {line}" for line in lines)
        print(f"{row.name}: the benchmark {what}\n{text}", file=sys.stderr)
        return None


def machine_at_hand() -> Machine:
    import torch

    gpu, memory = None, 0
    if torch.cuda.is_available():
        gpu = gpu_kind(torch.cuda.get_device_name(0))
        memory = torch.cuda.get_device_properties(0).total_memory
    return Machine(_cpu_model(), len(os.sched_getaffinity(0)), gpu, memory)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
