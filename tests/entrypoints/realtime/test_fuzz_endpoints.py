# SPDX-License-Identifier: Apache-2.0
"""Mutated messages at every door: documented errors only, no growth.

`fuzz_endpoints.py` runs any number of them.
"""

import pytest
from fuzz_endpoints import check, fuzz


@pytest.mark.parametrize(
    ("count", "seed"), [(30_000, 1), pytest.param(10_000_000, 2, marks=pytest.mark.nightly)]
)
def test_mutated_messages_end_in_documented_errors(count: int, seed: int) -> None:
    """Decoders and parsers of all three doors."""
    check(fuzz(count, seed))
