# SPDX-License-Identifier: Apache-2.0
"""Files of Triton kernels can be imported where Triton is not installed, as on most machines without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import vllm_omni

PACKAGE = Path(vllm_omni.__file__).parent

WITHOUT_TRITON = """
import importlib, json, sys
from importlib.machinery import PathFinder

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTriton
kernels = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    kernels[name] = sorted(key for key in vars(module) if key.endswith("_kernel"))
print(json.dumps({"kernels": kernels, "triton": "triton" in sys.modules}))
"""


def kernel_files() -> list[str]:
    """Modules of this package that define Triton kernels."""
    paths = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py") if "@triton.jit" in path.read_text())
    return sorted(".".join(path.with_suffix("").parts) for path in paths)


def test_kernel_files_are_imported_without_triton() -> None:
    """Each with its kernels' names; none of them imports Triton past `triton_or_names`."""
    names = kernel_files()
    assert len(names) >= 3
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["triton"] and all(found["kernels"][name] for name in names)
