# SPDX-License-Identifier: Apache-2.0
"""Serialize a live stream's controls so that another server can continue the stream.

The serialized state contains data that the session's snapshot lacks: held buttons, the rest of a
script, the pose of the commanded camera, and inputs that are waiting for the next chunk. The
classes in this directory are serialized with their private fields. Only servers of the same fleet
exchange the serialized state.
"""

from typing import Any, TypeVar

import msgspec
import numpy as np

from vllm_omni.entrypoints.errors import EndpointError

MAX_STATE_BYTES = 1 << 20
"""Maximum size of the serialized state in bytes. All control buffers are bounded well below this
size.
"""

T = TypeVar("T", bound=msgspec.Struct)


def encode_state(state: msgspec.Struct) -> bytes:
    """Serialize a stream's controls."""
    return msgspec.msgpack.encode(state, enc_hook=_to_list)


def decode_state(data: bytes, kind: type[T]) -> T:
    """Deserialize a stream's controls.

    Args:
        data: Result of `encode_state`.
        kind: Class of the stream's controls.

    Raises:
        EndpointError: `invalid_request` if the state belongs to another endpoint.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_to_array)
    except msgspec.ValidationError:
        message = "the session was started by another endpoint; continue it there"
        raise EndpointError("invalid_request", message, param="session_id") from None


def _to_list(value: Any) -> list[Any]:
    assert isinstance(value, np.ndarray), type(value)
    values: list[Any] = value.tolist()
    return values


def _to_array(kind: type, value: list[Any]) -> np.ndarray:
    assert kind is np.ndarray, kind
    return np.array(value, np.float64)
