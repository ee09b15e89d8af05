# SPDX-License-Identifier: Apache-2.0
"""The platform plug-in is inactive unless the user enables it."""

import pytest

from vllm_omni import platforms


@pytest.mark.parametrize(
    ("value", "version", "expected"),
    [
        (None, "0.32.0+cpu", False),
        ("0", "0.32.0+cpu", False),
        ("1", "0.32.0", False),  # a CUDA build, for which vLLM already has a Ray resource name
        ("1", "0.32.0+cpu", True),
    ],
)
def test_only_a_cpu_build_with_the_variable_set_gets_the_platform(
    monkeypatch: pytest.MonkeyPatch, value: str | None, version: str, expected: bool
) -> None:
    if value is None:
        monkeypatch.delenv(platforms.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(platforms.VARIABLE, value)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert (platforms.platform() is not None) == expected


def test_the_platform_differs_from_the_stock_one_only_in_its_resource_name() -> None:
    """The plug-in overrides only one attribute of the stock CPU platform: its Ray resource name."""
    from vllm.platforms.cpu import CpuPlatform

    from vllm_omni.platforms.ray_cpu import RayCpuPlatform

    own = {name for name in vars(RayCpuPlatform) if not name.startswith("__")}
    assert RayCpuPlatform.__bases__ == (CpuPlatform,) and own == {"ray_device_key"}
