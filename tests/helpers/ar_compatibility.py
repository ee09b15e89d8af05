# SPDX-License-Identifier: Apache-2.0
"""`@feature`: marks a test as one that holds a row of docs/architecture/ar_compatibility.md.

`scripts/ar_compatibility.py` runs the marked tests and writes the table from what happened; a test
of the default suite checks that the table names exactly the marked tests.
"""

from typing import Any, Literal

import pytest

Runner = Literal["V1", "V2"]
How = Literal["engine", "mocked"]


def feature(name: str, runner: Runner = "V1", how: How = "engine", note: str = "") -> Any:
    """Mark a test as holding `feature` on a runner generation, in a real engine or with mocked
    scheduler outputs.
    """
    return pytest.mark.ar_feature(name=name, runner=runner, how=how, note=note)
