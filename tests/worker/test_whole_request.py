# SPDX-License-Identifier: Apache-2.0
"""Models that do not implement the step protocol: which of their methods runs, and which errors are
raised.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request, run_to_end
from torch import nn
from vllm.model_executor.models.registry import ModelRegistry

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor import whole_request
from vllm_omni.model_executor.models import registry
from vllm_omni.model_executor.vllm_model import StepPipeline
from vllm_omni.model_executor.whole_request import WholeRequestModel, find_method
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.null.world import family as null_world_family

Tensors = Mapping[str, torch.Tensor]


class Doubler(StepPipeline):
    """A model that doubles the tensor `x`. A request's options can select a failure."""

    supports_step_execution = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        self.gain.data.copy_(dict(weights)["gain"])
        return {"gain"}

    def diffuse(self, params: DiffusionParams, tensors: Tensors) -> Any:
        raise AssertionError("`forward` comes before `diffuse`")

    def forward(self, params: DiffusionParams, tensors: Tensors, **kwargs: Any) -> Any:  # type: ignore[override]
        if params.options.get("fail") == "refuse":
            raise RequestFailed("invalid_request", "not this one")
        if params.options.get("fail") == "crash":
            raise ValueError("a path: /secret")
        scale = float("nan") if params.options.get("fail") == "nan" else 2.0
        return {"doubled": True}, {"y": tensors["x"] * scale}


FAMILY = dataclasses.replace(
    null_world_family.FAMILY,
    name="doubler",
    detect=lambda path: (path / "doubler").exists(),
    hf_config=lambda path: {
        **null_world_family.FAMILY.hf_config(path),
        "architectures": ["Doubler"],
    },
)


@pytest.fixture
def doubler(tmp_path: Path, null_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the `doubler` model family. Its model class is registered with vLLM's public
    registry.
    """
    ModelRegistry.register_model("Doubler", Doubler)
    monkeypatch.setitem(registry._FAMILY_MODULES, "doubler", __name__)
    shutil.copyfile(null_world / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "doubler").touch()
    return tmp_path


def test_the_runner_serves_a_model_without_steps(
    doubler: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model that does not implement steps, one request takes one engine step.

    A failure affects only its own request. A log line names the model method that runs.
    """
    said: list[str] = []
    monkeypatch.setattr(whole_request.logger, "info", lambda text, *args: said.append(text % args))
    runner = make_runner(doubler)
    assert said == ["Doubler runs whole requests through its method 'forward'"]
    x = torch.arange(3.0)

    def request(name: str, fail: str | None = None, one_shot: bool = True) -> Any:
        options = {"fail": fail} if fail else {}
        return new_request(name, {"x": x}, session_id=name, one_shot=one_shot, options=options)

    results = run_to_end(
        runner,
        request("good"),
        request("refused", "refuse"),
        request("crashed", "crash"),
        request("nan", "nan"),
        request("session", one_shot=False),
        request("also-good"),
    )
    for name in ("good", "also-good"):
        meta, tensors = results[name]
        assert meta["doubled"] is True and torch.equal(tensors["y"], x * 2)
    assert results["refused"].message == "not this one"
    assert results["crashed"].code == "engine_error" and "secret" not in results["crashed"].message
    assert results["nan"].code == "non_finite"
    assert "one_shot" in results["session"].message
    assert len(runner.sessions) == 0


@pytest.mark.parametrize(
    ("methods", "found"),
    [
        (("sample", "forward", "diffuse"), "sample"),
        (("forward", "diffuse"), "forward"),
        (("diffuse",), "diffuse"),
    ],
)
def test_sample_precedes_forward_and_diffuse(methods: tuple[str, ...], found: str) -> None:
    """`sample` takes precedence over `forward` and `diffuse`. Methods inherited from nn.Module and
    StepPipeline do not count.
    """
    for base in (nn.Module, StepPipeline):
        model = type(
            "Model", (base,), dict.fromkeys(methods, lambda self, params, tensors: ({}, {}))
        )
        assert find_method(model.__new__(model)) == found


def test_a_model_without_a_method_is_refused() -> None:
    class Nothing(StepPipeline):
        pass

    with pytest.raises(TypeError, match=r"Nothing .* none of sample, forward, diffuse"):
        WholeRequestModel(Nothing.__new__(Nothing))
