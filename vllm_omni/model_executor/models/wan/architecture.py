# SPDX-License-Identifier: Apache-2.0
"""Reading a transformer's `config.json` key by key, in Wan's own or diffusers' style: nothing is guessed.

Held by tests/model_executor/models/lingbot_world/test_lingbot_config.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def read_architecture(
    values: Mapping[str, Any],
    renamed: Mapping[str, str],
    required: Mapping[str, tuple[Any, ...]],
    ignored: Sequence[str],
    default_heads: int,
    default_dim: int,
) -> dict[str, Any]:
    """Return the constructor arguments that `values` give.

    renamed: checkpoint key -> argument (`attention_head_dim` is folded into `dim`). required: keys whose value must be
    one of those listed. ignored: keys that change nothing. Raises ValueError naming unknown keys, values that are not
    implemented, and keys that contradict each other.
    """
    unknown = sorted(set(values) - set(renamed) - set(required) - set(ignored))
    if unknown:
        raise ValueError(
            f"transformer config has unknown keys {unknown}; known: {sorted({*renamed, *required, *ignored})}"
        )
    for key, allowed in required.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"transformer config has {key} = {values[key]!r}; this model implements {allowed}")
    fields: dict[str, Any] = {}
    for key, name in renamed.items():
        if values.get(key) is None or key in ignored:
            continue
        value = tuple(values[key]) if key == "patch_size" else values[key]
        if name in fields and fields[name] != value:
            raise ValueError(f"transformer config gives {name} twice: {fields[name]} and {value} ({key})")
        fields[name] = value
    head_dim = fields.pop("attention_head_dim", None)
    if head_dim is not None:
        heads = fields.get("num_heads", default_heads)
        dim = fields.setdefault("dim", heads * head_dim)
        if dim != heads * head_dim:
            raise ValueError(f"attention_head_dim {head_dim} contradicts dim {dim} over {heads} heads")
    else:
        fields.setdefault("dim", default_dim)
    return fields
