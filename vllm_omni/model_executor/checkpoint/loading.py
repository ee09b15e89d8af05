# SPDX-License-Identifier: Apache-2.0
"""Strict loading of named tensors: renaming by table, names and shapes compared before any data is
read.

Missing, unexpected and misshapen tensors raise with counts and examples. Then only the tensors (and
parts of tensors) that this rank holds are read, one at a time. Knows no model and no folder;
`tensor_files.py` reads the files.
Held by tests/model_executor/models/lingbot_world/test_weights.py.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from vllm_omni.model_executor.checkpoint.quantized_weights import (
    ReadBack,
    is_finite,
    match_layers,
    model_names,
)
from vllm_omni.model_executor.checkpoint.tensor_files import Shape, TensorSource
from vllm_omni.model_executor.checkpoint.tensor_names import Rules, rename
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots


def load_strict(
    module: nn.Module,
    source: TensorSource,
    expected: Mapping[str, Shape],
    rules: Rules = (),
    *,
    what: str,
    ignored: Collection[str] = (),
) -> None:
    """Fill every parameter of `module` from `source`; nothing may be left over, on either side.

    expected: name -> shape of the whole component, of which `module` may hold a part (a pipeline
    stage, a tensor parallel slice, one half of a VAE). rules: stored names -> names in `expected`.
    what: the component, for errors.
    ignored: stored names to leave out. Layers that are stored quantized go, with their scales, into
    layers of this kind; elsewhere their numbers are read back. Raises ValueError with counts and
    examples for missing, unexpected, misshapen, repeated, mistyped and non-finite tensors.
    """
    try:
        stored = model_names(source, rules, ignored)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    # tied names become one
    slots = {rename(name, rules): slot for name, slot in checkpoint_slots(module).items()}
    fit = match_layers(stored, source, expected, slots)
    check_shapes(fit.found, fit.expected, f"{what}: {source.where}")
    assert slots.keys() <= fit.expected.keys(), (
        f"{what}: the model has parameters that its own list of names lacks"
    )
    if mistyped := fit.mistyped(source.dtypes, slots):
        raise ValueError(
            f"{what}: {source.where} has tensors of another type than this model: {some(mistyped)}"
        )

    targets = {fit.stored[target]: target for target in slots}
    unfilled, non_finite = set(slots), []
    for name, tensor in ReadBack(source, fit.read_back.values()).read_tensors(targets):
        slot = slots[targets[name]]
        slot.load(tensor)
        unfilled.remove(targets[name])
        # a weight that is quantized once its layer is complete
        held = tensor if slot.target.is_meta else slot.target
        if not is_finite(held):
            non_finite.append(name)
    if non_finite:
        raise ValueError(
            f"{what}: {source.where} has NaN or Inf in {some(non_finite)}; download it again"
        )
    assert not unfilled, f"{what}: {some(sorted(unfilled))} left unfilled"


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Raise ValueError with counts and three examples of each kind unless both maps are equal."""
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [
            f"{name} {tuple(found[name])} instead of {shape}"
            for name, shape in expected.items()
            if name in found and tuple(found[name]) != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in problems.items() if names)
        raise ValueError(
            f"{where} does not fit this model ({len(expected)} tensors expected): {listed}"
        )


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    """Return name -> shape of a module's parameters (tied ones once)."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def some(names: Sequence[str]) -> str:
    """How many names there are, and the first three; a file's names may hold anything, and
    errors are one line.
    """
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})"
