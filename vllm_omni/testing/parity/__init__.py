# SPDX-License-Identifier: Apache-2.0
"""Models beside tensors recorded from their original implementations, a module a family: `vllm-omni verify`."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.testing.parity.comparison import Report

FAMILIES = ("causal_wan", "lance", "lingbot_world", "matrix_game", "waypoint")
"""The families that have recorded tensors to be compared with."""


def verify(family: str, golden: Path) -> "Report":
    """Run every scenario file of the folder `golden`. family: one of `FAMILIES`."""
    from vllm_omni.testing.parity.comparison import Report

    report = import_module(f"vllm_omni.testing.parity.{family}").verify(golden)
    assert isinstance(report, Report)
    return report
