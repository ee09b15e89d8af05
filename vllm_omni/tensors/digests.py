# SPDX-License-Identifier: Apache-2.0
"""Tensor digests, computed on the device that holds the tensors.

When a session moves to another server, the two servers compare digests of its tensors. The tensors
are checked in device memory, where they are used, in a fraction of the time that SHA-256 would take
on the host. Digests detect damage and changes, but do not protect against deliberate manipulation.
The operator's key prevents manipulation.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

_ROW_WORDS: Final = 1 << 16
_LEAST_ROW_BYTES: Final = 4096
"""Minimum number of bytes in a row. Tensors with shorter rows are digested as one row."""
_BLOCK_BYTES: Final = 64 << 20
"""Temporary memory in bytes for one block of rows."""
_MOST_ROWS: Final = 1 << 12
"""Number of factors to compute initially, one per row."""
_MIX: Final = (-7046029254386353131, -4658895280553007687)  # odd 64-bit constants of splitmix64


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a 64-bit digest of each tensor's elements in logical order, as hexadecimal digits.

    A digest is the sum of the tensor's 64-bit words, where each word is multiplied by an odd number
    that depends on its position. A change to a single word therefore always changes the digest.
    """
    factors: dict[tuple[int, torch.device], torch.Tensor] = {}
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}

    def factors_for(count: int, device: torch.device) -> torch.Tensor:
        if (count, device) not in factors:
            factors[count, device] = _factors(count, device)
        return factors[count, device]

    with torch.inference_mode():
        for name, tensor in tensors.items():
            total = torch.zeros((), dtype=torch.int64, device=tensor.device)
            of_rows = factors_for(_MOST_ROWS, tensor.device)
            start = 0
            for rows in _rows(tensor):
                words = rows.shape[1]
                of_words = factors_for(words, tensor.device)
                for block in rows.split(max(1, _BLOCK_BYTES // (8 * words))):
                    if start + len(block) > len(of_rows):
                        of_rows = factors_for(2 * (start + len(block)), tensor.device)
                    of_block = of_rows[start : start + len(block)]
                    total += ((block * of_words).sum(1) * of_block).sum()
                    start += len(block)
            sums.setdefault(tensor.device, {})[name] = total
        values = {
            name: value
            for found in sums.values()
            for name, value in zip(found, torch.stack(list(found.values())).tolist(), strict=True)
        }
    return {name: f"{values[name] % (1 << 64):016x}" for name in tensors}


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return `count` odd pseudo-random numbers as an int64 tensor."""
    mixed = torch.arange(1, 1 + count, dtype=torch.int64, device=device)
    for factor in _MIX:
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return mixed | 1


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor as int64 rows `[rows, words]`. The bytes are copied only if
    necessary.
    """
    if not tensor.numel():
        return
    row_bytes = tensor[0, 0].nbytes if tensor.dim() > 2 else 0
    if row_bytes < _LEAST_ROW_BYTES or row_bytes % 8:
        yield from _flat_rows(tensor)
        return
    # In a K/V window, for example, the frames are long rows that are far apart in memory.
    step = tensor.shape[1] * tensor.stride(1)
    is_view = tensor.stride(0) == step and tensor[0, 0].is_contiguous()
    for part in (tensor.flatten(0, 1),) if is_view else tensor:
        rows = part.flatten(1)
        size = rows.element_size()
        is_aligned = rows.stride(0) * size % 8 == rows.storage_offset() * size % 8 == 0
        if rows.stride(1) != 1 or not is_aligned:
            rows = rows.clone(memory_format=torch.contiguous_format)
        yield rows.view(torch.int64)


def _flat_rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // (8 * _ROW_WORDS) * (8 * _ROW_WORDS)
    if whole:
        yield data[:whole].view(torch.int64).view(-1, _ROW_WORDS)
    if whole < len(data):
        rest = torch.zeros(-(-(len(data) - whole) // 8) * 8, dtype=torch.uint8, device=data.device)
        rest[: len(data) - whole] = data[whole:]
        yield rest.view(torch.int64).view(1, -1)
