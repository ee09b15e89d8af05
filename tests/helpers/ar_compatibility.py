# SPDX-License-Identifier: Apache-2.0
"""`@feature` marks a test that verifies a row of docs/architecture/ar_compatibility.md.

`scripts/ar_compatibility.py` runs the marked tests and writes the table from their outcomes. A test
in the default suite checks that the table lists exactly the features that the marked tests verify.
"""

from typing import Any, Literal

import pytest

Runner = Literal["V1", "V2"]
How = Literal["engine", "mocked"]


def feature(name: str, runner: Runner = "V1", how: How = "engine", note: str = "") -> Any:
    """Return a mark for a test that verifies a feature.

    Args:
        name: Name of the vLLM feature in the table.
        runner: Which of vLLM's two model runners the test uses.
        how: Whether the test uses a real engine or a runner with mocked scheduler outputs.
        note: Remark for the table.
    """
    return pytest.mark.ar_feature(name=name, runner=runner, how=how, note=note)
