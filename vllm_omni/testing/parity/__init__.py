# SPDX-License-Identifier: Apache-2.0
"""Compares models with tensors recorded from their original implementations (`vllm-omni verify`).
Each family has one module.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vllm_omni.model_executor.models.registry import family_names

if TYPE_CHECKING:
    from vllm_omni.testing.parity.comparison import ComparisonReport

_SHARED = ("wan22_vae",)
"""Networks that several families use and that have a module in this package."""
FAMILIES = (
    *(name for name in family_names() if find_spec(f"{__name__}.{name}") is not None),
    *_SHARED,
)
"""Registered families that have a module in this package, and `wan22_vae`, which several families
use.
"""


def verify(family: str, golden: Path) -> "ComparisonReport":
    """Run all scenarios in a directory of golden files.

    Args:
        family: One of `FAMILIES`.
        golden: Directory of golden files. Files named `*.xz` are decompressed or extracted first.
    """
    from vllm_omni.testing.parity.comparison import ComparisonReport, unpack_golden

    module = import_module(f"vllm_omni.testing.parity.{family}")
    if not any(golden.glob("*.xz")):
        report = module.verify(golden)
    else:
        with TemporaryDirectory() as scratch:
            unpack_golden(golden, Path(scratch))
            report = module.verify(Path(scratch))
    assert isinstance(report, ComparisonReport)
    report.golden = str(golden)
    return report
