# SPDX-License-Identifier: Apache-2.0
"""Hidden states of autoregressive requests: request parameters, results and wire format.

A client requests hidden states in `SamplingParams.extra_args` (`HiddenStatesRequest.to_extra_args`)
and reads them from vLLM's `RequestOutput` (`hidden_states_of`). This works both with offline
inference and with streaming. Hidden states are transported in `CompletionOutput.sampling_mask`,
because this is the only per-token field that vLLM collects, merges for slow readers, and truncates
at a stop string together with the tokens. Only `encode_hidden_states` and `_decode` depend on the
entry format. The scheduler and the worker for hidden states are in other modules.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np
import torch

from vllm_omni.outputs import RequestFailed

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.outputs import SamplingMaskLists

EXTRA_ARGS_KEY: Final = "omni"
FINAL: Final = -1
"""Index of the last layer. The hidden states of the last layer are taken after the final norm and
are the input to the model's output head."""

_ERROR_PREFIX: Final = "hidden_states: "
_MAGIC: Final = b"VOHS"
# The fields are: magic, position, token id, dtype, whether the entry replaces earlier entries, and
# number of layers. The hidden size and the layer indices follow the header.
_HEADER: Final = struct.Struct("<4sIIB?H")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_END: Final = 1
"""Last byte of every entry. Entries must not end with zero, because NumPy strips trailing zeros
from byte strings."""

LayerIndex = Annotated[int, msgspec.Meta(ge=-1024, le=1024)]


class HiddenStatesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Specifies the tokens and layers whose hidden states a request returns."""

    hidden_states: Literal["all", "generated", "last"]
    """Tokens whose hidden states are returned: `all` tokens that the model has processed (prompt
    and generated), only the `generated` tokens, or only the `last` token. The last sampled token
    has no hidden state, because it was never fed back to the model.
    """
    layers: Annotated[tuple[LayerIndex, ...], msgspec.Meta(min_length=1, max_length=64)] = (FINAL,)
    """Layer indices as in `output_hidden_states` of Hugging Face Transformers: 0 is the input
    embeddings, k is the output of block k, and -1 (or the number of blocks) is the output of the
    final norm. Layers other than the last must be enabled at startup with
    `omni.hidden_state_layers`.
    """

    def to_extra_args(self) -> dict[str, Any]:
        """Return `SamplingParams.extra_args` that contain this request."""
        return {EXTRA_ARGS_KEY: {"hidden_states": self.hidden_states, "layers": list(self.layers)}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "HiddenStatesRequest | None":
        """Parse the request for hidden states in `SamplingParams.extra_args`.

        Args:
            extra_args: `SamplingParams.extra_args`. The request for hidden states in `extra_args`
                may also be a JSON string, because the HTTP API's `vllm_xargs` does not support
                nested objects.

        Returns:
            The request, or None if `extra_args` does not request hidden states.

        Raises:
            RequestFailed: The request is malformed (code `invalid_request`).
        """
        requested = (extra_args or {}).get(EXTRA_ARGS_KEY)
        if requested is None:
            return None
        try:
            request = (
                msgspec.json.decode(requested, type=cls)
                if isinstance(requested, str)
                else msgspec.convert(requested, cls)
            )
        except (msgspec.DecodeError, UnicodeError) as error:
            raise RequestFailed(
                "invalid_request",
                f"extra_args[{EXTRA_ARGS_KEY!r}]: {error}; allowed: hidden_states (all, generated "
                "or last) and layers "
                "(a list of layer numbers)",
            ) from error
        if len(set(request.layers)) != len(request.layers):
            raise RequestFailed(
                "invalid_request", f"layers must be unique, got {list(request.layers)}"
            )
        return request


class HiddenStates(Mapping[int, torch.Tensor]):
    """Hidden states of one completion. The keys are the request's layer indices.

    Each value is a tensor `[num_rows, hidden_size]` on the CPU, in the model's dtype.

    Attributes:
        positions: Index of each row's token in the prompt followed by the completion, int64
            `[num_rows]`, strictly increasing.
        token_ids: Token id of each row, int64 `[num_rows]`. The id is 0 if the prompt was given as
            embeddings.
        newest_only: Whether this is the streamed result of a `last` request, which a later delta
            may replace.
    """

    def __init__(
        self,
        layers: dict[int, torch.Tensor],
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        newest_only: bool = False,
    ) -> None:
        self._layers = layers
        self.positions = positions
        self.token_ids = token_ids
        self.newest_only = newest_only

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def num_positions(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self._layers.values())

    @property
    def last(self) -> "HiddenStates":
        """The hidden states of only the last token (`[1, hidden_size]`)."""
        return HiddenStates(
            {k: states[-1:] for k, states in self.items()}, self.positions[-1:], self.token_ids[-1:]
        )


def hidden_states_of(
    output: "RequestOutput | CompletionOutput", index: int = 0
) -> HiddenStates | None:
    """Return a completion's hidden states.

    Args:
        output: Result of `LLM.generate` or `AsyncLLM.generate`. A streamed delta contains the
            hidden states of its own tokens; the first delta also contains all hidden states of the
            prompt. If the output kind is `CUMULATIVE` or `FINAL_ONLY`, only the finished request's
            output contains hidden states, and that output contains all of them.
        index: Index of the completion among the `n` completions.

    Returns:
        The hidden states, or None if the output contains none.

    Raises:
        RequestFailed: The request failed because of its hidden states.
    """
    from vllm.outputs import RequestOutput

    completion = output.outputs[index] if isinstance(output, RequestOutput) else output
    if (
        completion.finish_reason == "error"
        and (failed := error_of(completion.stop_reason)) is not None
    ):
        raise failed
    if completion.sampling_mask is None:
        return None
    per_token: Any = completion.sampling_mask.token_ids  # vLLM itself would store ids here
    states = [state for states in per_token for state in states]
    return _decode(states) if states else None


def concat(parts: Sequence[HiddenStates | None]) -> HiddenStates | None:
    """Join the hidden states of consecutive deltas.

    Returns:
        All hidden states or, for a `last` request, only the newest ones. None if no delta contains
        hidden states.
    """
    found = [part for part in parts if part is not None]
    if len(found) < 2 or found[-1].newest_only:
        return found[-1] if found else None
    return HiddenStates(
        {layer: torch.cat([part[layer] for part in found]) for layer in found[0]},
        torch.cat([part.positions for part in found]),
        torch.cat([part.token_ids for part in found]),
    )


def to_safetensors(states: HiddenStates) -> bytes:
    """Return the bytes of a safetensors file that contains the tensors `layer.<index>`, `positions`
    and `token_ids`.
    """
    from safetensors.torch import save

    layers = {f"layer.{layer}": token_states.contiguous() for layer, token_states in states.items()}
    return save({**layers, "positions": states.positions, "token_ids": states.token_ids})


def from_safetensors(data: bytes) -> HiddenStates:
    """Parse the bytes of a file that `to_safetensors` wrote. HTTP API clients use this function."""
    from safetensors.torch import load

    tensors = load(data)
    layers = {
        int(name.removeprefix("layer.")): states
        for name, states in tensors.items()
        if name.startswith("layer.")
    }
    return HiddenStates(layers, tensors["positions"], tensors["token_ids"])


def error_text(failed: RequestFailed) -> str:
    """Return the stop reason for a request that fails with an error."""
    return f"{_ERROR_PREFIX}{json.dumps([failed.code, failed.message])}"


def error_of(stop_reason: int | str | None) -> RequestFailed | None:
    """Parse a stop reason written by `error_text`. The result is None for other stop reasons."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(_ERROR_PREFIX):
        return None
    code, message = json.loads(stop_reason.removeprefix(_ERROR_PREFIX))
    return RequestFailed(code, message)


def encode_hidden_states(
    states: torch.Tensor,
    layers: Sequence[int],
    positions: Sequence[int],
    token_ids: Sequence[int],
    num_tokens: int,
    newest_only: bool = False,
) -> "SamplingMaskLists":
    """Pack hidden states for transport to the client.

    The last rows are attached to the newly sampled tokens, one row per token. All earlier rows are
    attached to the first of these tokens. If vLLM truncates tokens at the end, their hidden states
    are therefore truncated as well.

    Args:
        states: Hidden states `[num_rows, len(layers), hidden_size]` on the CPU.
        layers: The request's layer indices.
        positions: Position of each row's token.
        token_ids: Token id of each row.
        num_tokens: Number of newly sampled tokens.
        newest_only: Whether the client keeps only the newest row.
    """
    from vllm.v1.outputs import SamplingMaskLists

    num_rows, num_layers, hidden_size = states.shape
    shape = struct.pack(f"<I{num_layers}h", hidden_size, *layers)
    payload = states.contiguous().view(num_rows, -1).view(torch.uint8).numpy()
    start = _HEADER.size + len(shape)
    packed = np.empty((num_rows, start + payload.shape[1] + 1), dtype=np.uint8)
    for i, (position, token_id) in enumerate(zip(positions, token_ids, strict=True)):
        head = _HEADER.pack(
            _MAGIC, position, token_id, _DTYPES.index(states.dtype), newest_only, num_layers
        )
        packed[i, :start] = np.frombuffer(head + shape, dtype=np.uint8)
    packed[:, start:-1] = payload
    packed[:, -1] = _END
    newest = min(num_tokens, num_rows)
    counts = np.zeros(num_tokens, dtype=np.int64)
    counts[num_tokens - newest :] = 1
    counts[0] += num_rows - newest
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    return SamplingMaskLists(packed.view(f"S{packed.shape[1]}").reshape(num_rows), offsets)


def _decode(states: Sequence[bytes]) -> HiddenStates:
    magic, _, _, dtype_index, newest_only, num_layers = _HEADER.unpack_from(states[0])
    states = states[-1:] if newest_only else states
    if magic != _MAGIC:
        raise ValueError("the engine's sampling masks are not hidden states")
    hidden_size, *layers = struct.unpack_from(f"<I{num_layers}h", states[0], _HEADER.size)
    start = _HEADER.size + struct.calcsize(f"<I{num_layers}h")
    packed = np.frombuffer(b"".join(states), dtype=np.uint8).reshape(len(states), -1)
    numbers = packed[:, 4:12].copy().view(np.uint32).astype(np.int64)
    payload = torch.from_numpy(packed[:, start:-1].copy()).view(_DTYPES[dtype_index])
    payload = payload.view(len(states), num_layers, hidden_size)
    return HiddenStates(
        {layer: payload[:, i] for i, layer in enumerate(layers)},
        torch.from_numpy(numbers[:, 0].copy()),
        torch.from_numpy(numbers[:, 1].copy()),
        newest_only,
    )
