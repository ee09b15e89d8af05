# SPDX-License-Identifier: Apache-2.0
"""Tests that share an engine or a server are handed to one process."""

import pytest
from two_processes import TOGETHER, unit_of

SHARED_OVER_FILES = ("null_engine", "served")


def test_files_that_share_an_engine_stay_together(request: pytest.FixtureRequest) -> None:
    """Of all files of this run."""
    for item in request.session.items:
        for fixture in SHARED_OVER_FILES:
            package = "/engine/" if fixture == "null_engine" else "/realtime/"
            if fixture in getattr(item, "fixturenames", ()) and package in item.nodeid:
                assert unit_of(item.nodeid) == fixture, f"add the file to TOGETHER: {item.nodeid}"


def test_other_files_are_units_of_their_own() -> None:
    assert unit_of("tests/test_inputs.py::test_one[a::b]") == "tests/test_inputs.py"
    assert set(TOGETHER.values()) == set(SHARED_OVER_FILES)


def test_the_files_exist(request: pytest.FixtureRequest) -> None:
    assert [name for name in TOGETHER if not (request.config.rootpath / name).is_file()] == []
