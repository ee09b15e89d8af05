# SPDX-License-Identifier: Apache-2.0
"""A tiny Lance checkpoint, written once."""

from pathlib import Path

import pytest

from vllm_omni.testing.tiny.lance import make_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the video model. Tests must not change it."""
    out = tmp_path_factory.mktemp("lance")
    make_tiny(out, 0, "video")
    return out
