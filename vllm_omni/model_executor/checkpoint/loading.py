# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoints strictly: tensor names and shapes are compared before any data is read.

Missing, unexpected and misshapen tensors cause an error with counts and examples. If the comparison
succeeds, only the tensors (or shards of tensors) that this rank needs are read, one at a time. This
module contains no model-specific code. `tensor_files.py` reads the files themselves.
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
    """Load all parameters of a module from a checkpoint, which must contain exactly one tensor for
    each parameter.

    If a layer in the module has the same quantization as the stored layer, the quantized weight and
    its scales are loaded unchanged. If the module's layer has no parameters for scales, the stored
    weight is dequantized. Any other combination of quantizations is an error.

    Args:
        module: Module whose parameters are loaded.
        source: The component's tensors, as stored in the checkpoint.
        expected: Shape of every tensor in the component, by name. `module` may be part of the
            component, for example a pipeline stage, a tensor-parallel shard or a VAE's encoder.
        rules: Renames from stored names to names in `expected`.
        what: Name of the component in error messages.
        ignored: Stored names to skip.

    Raises:
        ValueError: Tensors are missing, unexpected, misshapen, duplicated, not finite or of the
            wrong dtype. The error message contains counts and examples.
    """
    try:
        stored = model_names(source, rules, ignored)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    # Tied parameters are renamed to one common name.
    slots = {rename(name, rules): slot for name, slot in checkpoint_slots(module).items()}
    fit = match_layers(stored, source, expected, slots)
    check_shapes(fit.found, fit.expected, f"{what}: {source.where}")
    assert slots.keys() <= fit.expected.keys(), (
        f"{what}: the model has parameters that its own list of names lacks"
    )
    if mistyped := fit.mistyped(source.dtypes, slots):
        raise ValueError(
            f"{what}: {source.where} has tensors of another dtype than this model: {some(mistyped)}"
        )

    targets = {fit.stored[target]: target for target in slots}
    unfilled, non_finite = set(slots), []
    for name, tensor in ReadBack(source, fit.read_back.values()).read_tensors(targets):
        slot = slots[targets[name]]
        slot.load(tensor)
        unfilled.remove(targets[name])
        # If the target is on the meta device, it is quantized once its layer is complete, so the
        # stored tensor is checked instead.
        held = tensor if slot.target.is_meta else slot.target
        if not is_finite(held):
            non_finite.append(name)
    if non_finite:
        raise ValueError(
            f"{what}: {source.where} has NaN or Inf in {some(non_finite)}; download it again"
        )
    assert not unfilled, f"{what}: {some(sorted(unfilled))} left unfilled"


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Compare the names and shapes of stored and expected tensors.

    Raises:
        ValueError: Names or shapes differ. For each kind of difference, the error message contains
            the count and three examples.
    """
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
    """Return the shapes of a module's parameters, by name. Tied parameters appear once."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def some(names: Sequence[str]) -> str:
    """Return one line of text that contains the number of names and the first three names.

    Names are escaped, because names in a file can contain any character.
    """
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})"
