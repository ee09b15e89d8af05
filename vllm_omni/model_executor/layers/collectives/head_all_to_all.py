# SPDX-License-Identifier: Apache-2.0
"""Ulysses all-to-all: reshard from sequence-sharded to head-sharded before attention, and back
after it.

`CollectiveHeadAllToAll` packs bytes and calls an all-to-all. `PeerHeadAllToAll` writes into the
other ranks' memory if the GPUs support it (`ParallelContext.peers`). Without sequence parallelism,
no data moves.
"""

# B requests, T tokens (T_r: tokens of rank r), N heads (N_r = N / size), H head dim, K tensors of
# one type

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.layers.attention.attention import in_words
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, split_evenly
from vllm_omni.model_executor.layers.collectives.peer_memory import PeerMemory
from vllm_omni.model_executor.layers.cuda_graphs import persistent_buffer, persistent_copy


def tokens_to_heads(
    parallel: ParallelContext, parts: Sequence[torch.Tensor], num_tokens: int
) -> list[torch.Tensor]:
    """Reshard all `parts` in a single all-to-all: [B, T_r, N, H] (this rank's tokens) ->
    [B, num_tokens, N_r, H] (this rank's heads).

    Args:
        parallel: This rank's parallel layout.
        parts: Tensors of the same shape.
        num_tokens: Total number of tokens across all ranks.

    Returns:
        The resharded tensors, valid until the next call, which may reuse their memory.
    """
    if not parallel.sequence_parallel:
        return list(parts)
    all_to_all = head_all_to_all(
        parallel, parts[0], [(part.dtype, 1) for part in parts], num_tokens
    )
    for number, part in enumerate(parts):
        all_to_all.send(number, part)
    return [received[0] for received in all_to_all.exchange()]


def heads_to_tokens(parallel: ParallelContext, x_BTNH: torch.Tensor) -> torch.Tensor:
    """Reshard back: [B, T, N_r, H] (this rank's heads) -> [B, T_r, N, H] (this rank's tokens).

    The result is valid until the next call, which may reuse its memory.
    """
    if not parallel.sequence_parallel:
        return x_BTNH
    return in_words(heads_apart(parallel, x_BTNH)).flatten(2, 3).view(x_BTNH.dtype)


def heads_apart(parallel: ParallelContext, x_BTNH: torch.Tensor) -> torch.Tensor:
    """Return the result of `heads_to_tokens` in the layout that this rank receives, with one slice
    per sending rank: [B, T_r, size, N_r, H].

    This function requires sequence parallelism. The result is valid until the next call, which may
    reuse its memory.
    """
    if parallel.peers is not None:
        return _heads_written(parallel, parallel.peers, x_BTNH)
    batch, num_tokens, heads, head_dim = x_BTNH.shape
    lengths = split_evenly(num_tokens, parallel.size)
    own = [lengths[parallel.rank]] * parallel.size
    sent = persistent_copy("heads sent", x_BTNH.transpose(0, 1))
    received = persistent_buffer("tokens received", (sum(own), batch, heads, head_dim), sent)
    parallel.all_to_all(received.view(torch.uint8), sent.view(torch.uint8), own, lengths)
    return received.unflatten(0, (parallel.size, -1)).permute(2, 1, 0, 3, 4)


def _heads_written(
    parallel: ParallelContext, peers: PeerMemory, x_BTNH: torch.Tensor
) -> torch.Tensor:
    """Implement `heads_apart` by writing each rank's tokens into that rank's memory."""
    batch, num_tokens, *of_token = x_BTNH.shape
    lengths = split_evenly(num_tokens, parallel.size)
    longest = batch * lengths[0] * parallel.size * x_BTNH[0, 0].numel() * x_BTNH.itemsize
    received = [
        _of_shape(buffer, (batch, length, parallel.size, *of_token), x_BTNH.dtype)
        for buffer, length in zip(peers.buffers("tokens received", longest), lengths, strict=True)
    ]
    for position, part in zip(received, x_BTNH.split(lengths, dim=1), strict=True):
        in_words(position[:, :, parallel.rank]).copy_(in_words(part))
    peers.barrier()
    return received[parallel.rank]


def head_all_to_all(
    parallel: ParallelContext,
    like_BTNH: torch.Tensor,
    parts: Sequence[tuple[torch.dtype, int]],
    num_tokens: int,
) -> "HeadAllToAll":
    """Return an all-to-all from tokens to heads that writes to peer memory if peer memory is
    available.

    For the arguments, see `HeadAllToAll`.
    """
    kind = CollectiveHeadAllToAll if parallel.peers is None else PeerHeadAllToAll
    return kind(parallel, like_BTNH, parts, num_tokens)


class HeadAllToAll:
    """One all-to-all that sends this rank's tokens to the ranks that own the heads.

    Each token's bytes are contiguous. In the received data, the tokens of consecutive ranks are
    adjacent.

    Args:
        parallel: This rank's parallel layout.
        like_BTNH: A tensor of shape [B, T_r, N, H] on the device that holds this rank's tensors.
        parts: (dtype, number of tensors) of each part, widest dtype first. Each tensor has the
            shape of `like_BTNH`.
        num_tokens: Total number of tokens across all ranks.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        like_BTNH: torch.Tensor,
        parts: Sequence[tuple[torch.dtype, int]],
        num_tokens: int,
    ) -> None:
        batch, tokens, heads, self._width = like_BTNH.shape
        self._parallel, self._parts = parallel, tuple(parts)
        self._bytes = [
            kinds * heads // parallel.size * self._width * dtype.itemsize for dtype, kinds in parts
        ]
        self._sent_shape = (tokens, batch, sum(self._bytes))
        self._received_shape = (num_tokens, batch, sum(self._bytes))
        self._start(like_BTNH)

    def _start(self, like_BTNH: torch.Tensor) -> None:
        """Allocate or look up the memory to write to, on the device of `like_BTNH`."""
        raise NotImplementedError

    def send_buffer(self, part: int, rank: int) -> torch.Tensor:
        """Return the send buffer that holds one part of the data for the heads that `rank` owns:
        [K, B, T_r, N_r, H] in the part's dtype.
        """
        raise NotImplementedError

    def send(self, part: int, x_BTNH: torch.Tensor) -> None:
        """Write a part that consists of one tensor into the send buffers, each rank's heads into
        that rank's buffer.
        """
        for rank, x in enumerate(x_BTNH.unflatten(-2, (self._parallel.size, -1)).unbind(-3)):
            in_words(self.send_buffer(part, rank)[0]).copy_(in_words(x))

    def exchange(self) -> list[torch.Tensor]:
        """Run the all-to-all for all parts and return, for each part, the tensors of this rank's
        heads: [K, B, num_tokens, N_r, H].
        """
        raise NotImplementedError

    def _typed(self, bytes_: torch.Tensor) -> list[torch.Tensor]:
        """View bytes [..., T, B, bytes per token] as one tensor [K, B, T, ..., N_r, H] per part, in
        the part's dtype.
        """
        components = bytes_.split(self._bytes, dim=-1)
        return [
            part.view(dtype)
            .unflatten(-1, (kinds, -1, self._width))
            .movedim((-3, -4, -5), (0, 1, 2))
            for part, (dtype, kinds) in zip(components, self._parts, strict=True)
        ]


class CollectiveHeadAllToAll(HeadAllToAll):
    """A `HeadAllToAll` that packs the data for each rank and sends it in a single all-to-all of
    bytes.
    """

    def _start(self, like_BTNH: torch.Tensor) -> None:
        self._sent = persistent_buffer(
            "tokens sent", (self._parallel.size, *self._sent_shape), like_BTNH, torch.uint8
        )
        self._send_buffers = self._typed(self._sent)

    def send_buffer(self, part: int, rank: int) -> torch.Tensor:
        return self._send_buffers[part][:, :, :, rank]

    def send(self, part: int, x_BTNH: torch.Tensor) -> None:
        """Write a part into all ranks' send buffers in a single copy."""
        in_words(self._send_buffers[part][0]).copy_(
            in_words(x_BTNH.unflatten(-2, (self._parallel.size, -1)))
        )

    def exchange(self) -> list[torch.Tensor]:
        received = persistent_buffer("heads received", self._received_shape, self._sent)
        size, tokens = self._sent.shape[:2]
        lengths = split_evenly(len(received), size)
        self._parallel.all_to_all(received, self._sent.flatten(0, 1), lengths, [tokens] * size)
        return self._typed(received)


class PeerHeadAllToAll(HeadAllToAll):
    """A `HeadAllToAll` that writes directly into the memory that the other ranks read."""

    def _start(self, like_BTNH: torch.Tensor) -> None:
        peers, (tokens, batch, row) = self._parallel.peers, self._received_shape
        assert peers is not None
        buffers = peers.buffers("heads received", tokens * batch * row)
        self._received = [buffer.view(self._received_shape) for buffer in buffers]
        own = self._parallel.token_slice(tokens)
        self._send_buffers = [self._typed(received[own]) for received in self._received]

    def send_buffer(self, part: int, rank: int) -> torch.Tensor:
        return self._send_buffers[rank][part]

    def exchange(self) -> list[torch.Tensor]:
        self._parallel.barrier()
        return self._typed(self._received[self._parallel.rank])


def _of_shape(buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """View the first bytes of a buffer as a tensor of this shape and dtype."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[:nbytes].view(dtype).view(shape)
