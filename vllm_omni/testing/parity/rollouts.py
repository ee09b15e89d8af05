# SPDX-License-Identifier: Apache-2.0
"""Functions for rerunning recorded rollouts, shared by the comparisons of several families.

Recorded K/V caches have the layout of the original implementations, so `chronological` converts a
`KVWindow` to this layout before the comparison.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.testing.parity.comparison import GoldenScenario

_TIMESTEP = 1e-3


def ends(window: KVWindow) -> tuple[int, int]:
    """Return the two counters of the original implementation: the number of tokens ever committed,
    and the number of valid tokens in the buffer.
    """
    size = window.tokens_per_frame
    return window.committed_frames * size, min(window.committed_frames, window.window_frames) * size


def chronological(window: KVWindow, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of K and V, `[window tokens, N, H]`, oldest token first and with zeros at the
    end.
    """
    order = window.token_positions(
        [window.slot(frame) for frame in window.visible_frames(window.committed_frames)]
    )
    out = torch.zeros_like(window.buffer[layer])
    out[:, : len(order)] = window.buffer[layer].index_select(1, order)
    return out[0], out[1]


def recorded_layers(scenario: GoldenScenario, prefix: str) -> list[int]:
    """Return the layers that have a `{prefix}{layer}.k` tensor in the file."""
    names = [name for name in scenario.tensors if name.startswith(prefix) and name.endswith(".k")]
    return sorted(int(name.removeprefix(prefix).removesuffix(".k")) for name in names)


def clean_latents(x: torch.Tensor, flow: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return x0, computed in fp64 from noisy latents and their flow."""
    return (x.double() - sigma * flow.double()).float()


def renoised(x0: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """Add noise at level `sigma` to clean latents, computed in fp64."""
    return ((1 - sigma) * x0.double() + sigma * noise.double()).float()


class RecordedCalls:
    """The recorded forward passes of a rollout. They are compared in order.

    Args:
        scenario: Scenario file with the tensors `in`, `flow` and `x0` of each forward pass.
        calls: Recorded metadata of each forward pass.
        tolerance: Largest accepted difference between latents.
    """

    def __init__(
        self, scenario: GoldenScenario, calls: Sequence[Mapping[str, Any]], tolerance: float
    ) -> None:
        self._scenario, self._calls, self._tolerance = scenario, calls, tolerance
        self._done = 0

    @property
    def name(self) -> str:
        """Prefix of the next forward pass's tensor names."""
        return f"call{self._done:02d}"

    def compare(
        self, x: torch.Tensor, flow: torch.Tensor, x0: torch.Tensor, timestep: float
    ) -> Mapping[str, Any]:
        """Compare the input, the flow and the clean latents of the next forward pass with the
        recorded ones, in the recorded layout.

        Returns:
            The recorded metadata of the forward pass.

        Raises:
            ValueError: The recording lacks the forward pass or one of its tensors.
        """
        scenario, name = self._scenario, self.name
        if self._done == len(self._calls):
            raise ValueError(f"{self._done} calls are recorded, the rollout makes more")
        call = self._calls[self._done]
        self._done += 1
        recorded = torch.tensor([float(t) for t in call["t"]])
        scenario.compare("call timestep", torch.full_like(recorded, timestep), recorded, _TIMESTEP)
        scenario.compare_recorded("input", x, f"{name}.in", self._tolerance)
        scenario.compare_recorded("flow", flow, f"{name}.flow", self._tolerance)
        if f"{name}.x0" in scenario:
            scenario.compare_recorded("predicted clean latents", x0, f"{name}.x0", self._tolerance)
        return call

    def finish(self) -> None:
        """Raise ValueError if more forward passes were recorded than the rollout has run."""
        if self._done != len(self._calls):
            raise ValueError(
                f"{len(self._calls)} calls are recorded, the rollout makes {self._done}"
            )
