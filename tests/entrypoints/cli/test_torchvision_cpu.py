# SPDX-License-Identifier: Apache-2.0
"""`doctor --fix` makes PyPI's torchvision importable with a CPU build of torch."""

import subprocess
import sys
from pathlib import Path

from vllm_omni.entrypoints.cli.torchvision_cpu import declare_missing_operators

_EXTENSION = """
import torch


def _has_ops():
    return False
"""
_INIT = """
import torch
from torchvision import extension

torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: dets)
"""


def imports(folder: Path) -> bool:
    code = "import torchvision, torch; torch.ops.torchvision.nms"
    return (
        subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, check=False
        ).returncode
        == 0
    )


def test_declared_operators_make_the_import_work(tmp_path: Path) -> None:
    """Importing a stand-in package that has torchvision's import order fails before the fix and
    succeeds after it. Repeating the fix changes nothing.
    """
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(_INIT)
    (package / "extension.py").write_text(_EXTENSION)
    assert not imports(tmp_path)
    assert declare_missing_operators(package / "extension.py")
    assert imports(tmp_path)
    text = (package / "extension.py").read_text()
    assert not declare_missing_operators(package / "extension.py")
    assert (package / "extension.py").read_text() == text


def test_a_missing_extension_needs_no_fix(tmp_path: Path) -> None:
    assert not declare_missing_operators(tmp_path / "extension.py")
