# SPDX-License-Identifier: Apache-2.0
"""A test of a session of 2,000 chunks, which re-bases its frame positions 25 times."""

from pathlib import Path

import pytest
import torch
from abot_driver import load_world, open_session, run_chunk


@pytest.mark.nightly
def test_a_long_session_keeps_its_bytes_and_its_signal(layouts: dict[str, Path]) -> None:
    """A session's size in bytes stays constant over 6,000 latent frames, and its latents have the
    same spread at the end as at the start. A fork made halfway generates the same latents, bit for
    bit, as the original session.
    """
    world = load_world(layouts["original"])
    session = open_session(world, output="latents")
    twin, bases, nbytes, spread = None, set(), set(), []
    for chunk in range(2000):
        keys = [["w"]] * 3 if chunk % 3 else [["j"]] * 3
        latents = run_chunk(world, session, output="latents", actions=keys)
        bases.add(session.base)
        nbytes.add(session.nbytes)
        spread.append(float(latents.std()))
        if chunk == 999:
            twin = session.fork("twin")
        elif twin is not None and chunk < 1100:
            again = run_chunk(world, twin, output="latents", actions=keys)
            assert torch.equal(again, latents), chunk
    assert len(nbytes) == 1
    assert len(bases) == 25
    assert max(bases) == 5976
    first, last = (sum(part) / 100 for part in (spread[:100], spread[-100:]))
    assert abs(last - first) < 0.1 * first
