# SPDX-License-Identifier: Apache-2.0
"""Settings of the endpoints that come from the environment, because stock `vllm serve` has no flags
for them.

Each field of a settings struct corresponds to the variable `VLLM_OMNI_` followed by the field's
name in upper case.
"""

import os
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

PREFIX: Final = "VLLM_OMNI_"


def read_struct(cls: type[T], environ: Mapping[str, str] | None = None) -> T:
    """Create a settings struct from the variables that are set. Other fields have their default
    values.

    Args:
        cls: The struct.
        environ: The variables. Default: the process's environment.

    Raises:
        ValueError: A value is invalid. The text names the variable, its value and the allowed
            values.
    """
    environ = os.environ if environ is None else environ
    values = {}
    for field in msgspec.structs.fields(cls):
        name = PREFIX + field.name.upper()
        if name in environ:
            try:
                values[field.name] = msgspec.convert(environ[name], field.type, strict=False)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}={environ[name]!r}: {error}") from error
    return cls(**values)
