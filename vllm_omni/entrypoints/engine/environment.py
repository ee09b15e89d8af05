# SPDX-License-Identifier: Apache-2.0
"""Endpoint settings that are read from environment variables, because stock `vllm serve` has no
flags for them.

A field's variable is named `VLLM_OMNI_` followed by the field name in upper case.
"""

import os
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

PREFIX: Final = "VLLM_OMNI_"


def read_struct(cls: type[T], environ: Mapping[str, str] | None = None) -> T:
    """Create a settings struct from the environment variables that are set. All other fields keep
    their defaults.

    Args:
        cls: Settings struct type.
        environ: Environment variables. Default: those of this process.

    Raises:
        ValueError: A value is invalid. The message names the variable, its value and the allowed
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
