# SPDX-License-Identifier: Apache-2.0
"""Tests of `--additional-config '{"omni": {...}}'`: default values and errors."""

import pytest

from vllm_omni.config import OmniConfig


def test_nothing_given_means_all_defaults() -> None:
    """If `additional_config` is absent or empty, every option has its default value."""
    assert (
        OmniConfig.from_additional_config(None)
        == OmniConfig.from_additional_config({"other": 1})
        == OmniConfig()
    )


@pytest.mark.parametrize(
    ("omni", "reported"),
    [
        ({"max_sesions": 3}, "max_sesions"),
        ({"height": 8}, "height"),
        ({"max_requests_per_step": 0}, "max_requests_per_step"),
        ({"session_idle_s": "5"}, "session_idle_s"),
        ({"model": 3}, "model"),
        ({"pipeline": "temporal", "pipeline_partition": [2, 2]}, "there is no pipeline_partition"),
        ({"scheduling": "lifo"}, "allowed values: 'deadline', 'fifo'"),
        ({"scheduling": 3}, "allowed values: 'deadline', 'fifo'"),
        ({"degradations": ["worse"]}, "allowed values: 'fewer_steps', 'tiny_vae'"),
        ({"server_name": "a.b"}, "server_name"),
        ({"pipeline_partition": "even"}, "allowed values: 'measured'"),
    ],
)
def test_mistakes_are_named_with_the_allowed_keys(omni: dict[str, object], reported: str) -> None:
    """An unknown key, an out-of-range value or a wrong type raises a one-line error that names the
    key.
    """
    with pytest.raises(ValueError, match=reported) as error:
        OmniConfig.from_additional_config({"omni": omni})
    assert "allowed keys" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("unknown", "near"),
    [
        ("max_sesions", "max_sessions or max_session_bytes"),
        ("snapshot-dir", "snapshot_dir or drain_snapshot_dir or snapshot_period_s"),
        ("zzz", None),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(unknown: str, near: str | None) -> None:
    """The error for an unknown name suggests similar names, if there are any."""
    with pytest.raises(ValueError, match=f"unknown field `{unknown}`") as error:
        OmniConfig.from_additional_config({"omni": {unknown: 1}})
    assert (
        (f"did you mean {near}?" in str(error.value))
        if near
        else ("did you mean" not in str(error.value))
    )


def test_the_config_is_frozen() -> None:
    """The configuration is immutable after parsing."""
    with pytest.raises(AttributeError):
        OmniConfig().height = 3  # type: ignore[misc]


def test_a_process_parses_the_same_options_once() -> None:
    """The runner, the model and the scheduler in a process share a single parsed configuration.

    If the mapping with the options has changed since, it is parsed again.
    """
    given = {"omni": {"height": 64, "model": {"cache": {"frames": 3}}}}
    first = OmniConfig.from_additional_config(given)
    assert (
        OmniConfig.from_additional_config(
            {"omni": {"model": {"cache": {"frames": 3}}, "height": 64}}
        )
        is first
    )
    given["omni"]["model"]["cache"]["frames"] = 4  # type: ignore[index]
    assert first.model == {"cache": {"frames": 3}}
    assert OmniConfig.from_additional_config(given).model == {"cache": {"frames": 4}}
