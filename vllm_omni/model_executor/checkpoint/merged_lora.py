# SPDX-License-Identifier: Apache-2.0
"""`MergedSource`: merges a LoRA into a checkpoint (W + scale B A) while the checkpoint is read, one
tensor at a time.

`MergedSource` is for a LoRA that is a permanent part of a released model, not for adapters that
requests select. The LoRA's tensor names follow PEFT
(`base_model.model.blocks.0.ffn.0.lora_A.weight`, with or without an adapter name) or end in
`lora_down` and `lora_up`. Maths: https://arxiv.org/abs/2106.09685, equation 3.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from vllm_omni.model_executor.checkpoint.loading import Rules, rename
from vllm_omni.model_executor.checkpoint.tensor_files import Shape, TensorSource

_PART = re.compile(r"\.(lora_A|lora_B|lora_down|lora_up|alpha)(\.\w+)?(\.weight)?\Z")
_SIDES = {"lora_A": "down", "lora_down": "down", "lora_B": "up", "lora_up": "up", "alpha": "alpha"}


@dataclass(frozen=True)
class MergedSource:
    """A `TensorSource` with the names, shapes and dtypes of `base`. Use `of_base` to create one."""

    base: TensorSource
    """Checkpoint into which the LoRA is merged."""
    lora: TensorSource
    """The LoRA's tensors."""
    parts: Mapping[str, Mapping[str, str]]
    """Names of the LoRA's `down` [r, in], `up` [out, r] and optional `alpha`, keyed by name in
    `base`.
    """

    @classmethod
    def of_base(cls, base: TensorSource, lora: TensorSource, rules: Rules) -> "MergedSource":
        """Pair a LoRA's tensors with a checkpoint's tensors.

        Args:
            base: Checkpoint into which the LoRA is merged.
            lora: The LoRA's tensors.
            rules: Renames that map the names in both files to common names.

        Raises:
            ValueError: One of the LoRA's tensors does not belong to a weight, lacks its counterpart
                or has the wrong shape. The error message contains counts and examples.
        """
        stored = {rename(name, rules): name for name in base.shapes}
        parts: dict[str, dict[str, str]] = defaultdict(dict)
        problems: list[str] = []
        for name in lora.shapes:
            found = _PART.search(name)
            target = (
                None
                if found is None
                else stored.get(rename(f"{name[: found.start()]}.weight", rules))
            )
            if found is None or target is None:
                problems.append(f"{name} belongs to no weight")
            else:
                parts[target][_SIDES[found[1]]] = name
        problems += filter(
            None, (_misfit(base.shapes[name], named, lora) for name, named in parts.items())
        )
        if problems or not parts:
            listed = "; ".join(problems[:3]) or "it holds no tensors"
            raise ValueError(
                f"{lora.where} is no LoRA of {base.where}: {len(problems)} problems: {listed}"
            )
        return cls(base, lora, dict(parts))

    @property
    def where(self) -> str:
        return f"{self.base.where} with {self.lora.where}"

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self.base.shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self.base.dtypes

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, merged CPU tensor in the checkpoint's dtype). The merge is computed in
        fp32.
        """
        for name, tensor in self.base.read_tensors(names):
            yield name, self._merged(tensor, self.parts[name]) if name in self.parts else tensor

    def _merged(self, weight: torch.Tensor, named: Mapping[str, str]) -> torch.Tensor:
        stored = dict(self.lora.read_tensors(named.values()))
        down, up = stored[named["down"]].float(), stored[named["up"]].float()
        scale = float(stored[named["alpha"]]) / down.shape[0] if "alpha" in named else 1.0
        merged = (weight.float() + scale * (up @ down)).to(weight.dtype)
        if not torch.isfinite(merged).all():
            raise ValueError(
                f"{self.lora.where}: {named['up']} makes NaN or Inf of the weight that it changes"
            )
        return merged


def _misfit(shape: Shape, named: Mapping[str, str], lora: TensorSource) -> str | None:
    """Return why a LoRA does not match the weight that it changes, or None if it does."""
    if not {"down", "up"} <= named.keys():
        return f"{next(iter(named.values()))} lacks its other half"
    down, up = lora.shapes[named["down"]], lora.shapes[named["up"]]
    if 0 in down:
        return f"{named['down']} {tuple(down)} has rank 0"
    if "alpha" in named and math.prod(lora.shapes[named["alpha"]]) != 1:
        return f"{named['alpha']} {tuple(lora.shapes[named['alpha']])} is not one number"
    if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != tuple(shape) or down[0] != up[1]:
        return f"{named['up']} {tuple(up)} x {tuple(down)} does not make {tuple(shape)}"
    return None
