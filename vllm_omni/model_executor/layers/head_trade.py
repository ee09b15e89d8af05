# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel ranks (Ulysses) trade tokens for heads, and back: around attention, which needs all tokens.

By an all-to-all of packed bytes (`CollectiveTrade`), or by writing into the other ranks' memory (`PeerTrade`), where
they can (`ParallelContext.peers`). Without sequence parallelism nothing moves.
Held by tests/model_executor/layers/test_head_exchange.py.
"""

# B requests, T tokens (T_r: tokens of rank r), N heads (N_r = N / size), H head dim, K tensors of one type

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.layers.attention import in_words
from vllm_omni.model_executor.layers.forward_graphs import kept_buffer, kept_copy
from vllm_omni.model_executor.layers.parallel import ParallelContext, split_evenly
from vllm_omni.model_executor.layers.peer_memory import PeerMemory


def tokens_to_heads(parallel: ParallelContext, parts: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
    """Trade each of `parts`, in one exchange: [B, T_r, N, H] (this rank's tokens) -> [B, num_tokens, N_r, H] (this
    rank's heads). Parts are of one shape. Use the results before the next call: they may share its memory.
    """
    if not parallel.sequence_parallel:
        return list(parts)
    trade = head_trade(parallel, parts[0], [(part.dtype, 1) for part in parts], num_tokens)
    for number, part in enumerate(parts):
        trade.send(number, part)
    return [received[0] for received in trade.exchange()]


def heads_to_tokens(parallel: ParallelContext, x_BTNH: torch.Tensor) -> torch.Tensor:
    """Trade back: [B, T, N_r, H] (this rank's heads) -> [B, T_r, N, H] (this rank's tokens).

    Use the result before the next call, whose memory it may share.
    """
    if not parallel.sequence_parallel:
        return x_BTNH
    return in_words(heads_apart(parallel, x_BTNH)).flatten(2, 3).view(x_BTNH.dtype)


def heads_apart(parallel: ParallelContext, x_BTNH: torch.Tensor) -> torch.Tensor:
    """`heads_to_tokens` of sequence-parallel ranks, each rank's heads as they arrived: [B, T_r, size, N_r, H].

    Use the result before the next call, whose memory it may share.
    """
    if parallel.peers is not None:
        return _heads_written(parallel, parallel.peers, x_BTNH)
    batch, num_tokens, heads, head_dim = x_BTNH.shape
    lengths = split_evenly(num_tokens, parallel.size)
    own = [lengths[parallel.rank]] * parallel.size
    sent = kept_copy("heads sent", x_BTNH.transpose(0, 1))
    received = kept_buffer("tokens received", (sum(own), batch, heads, head_dim), sent)
    parallel.all_to_all(received.view(torch.uint8), sent.view(torch.uint8), own, lengths)
    return received.unflatten(0, (parallel.size, -1)).permute(2, 1, 0, 3, 4)


def _heads_written(parallel: ParallelContext, peers: PeerMemory, x_BTNH: torch.Tensor) -> torch.Tensor:
    """`heads_apart`, each rank's tokens written into its own memory."""
    batch, num_tokens, *of_token = x_BTNH.shape
    lengths = split_evenly(num_tokens, parallel.size)
    longest = batch * lengths[0] * parallel.size * x_BTNH[0, 0].numel() * x_BTNH.itemsize
    received = [
        _of_shape(buffer, (batch, length, parallel.size, *of_token), x_BTNH.dtype)
        for buffer, length in zip(peers.buffers("tokens received", longest), lengths, strict=True)
    ]
    for place, part in zip(received, x_BTNH.split(lengths, dim=1), strict=True):
        in_words(place[:, :, parallel.rank]).copy_(in_words(part))
    peers.meet()
    return received[parallel.rank]


def head_trade(
    parallel: ParallelContext, like_BTNH: torch.Tensor, parts: Sequence[tuple[torch.dtype, int]], num_tokens: int
) -> "HeadTrade":
    """Begin to trade tokens for heads, in one exchange. Arguments: of `HeadTrade`."""
    kind = CollectiveTrade if parallel.peers is None else PeerTrade
    return kind(parallel, like_BTNH, parts, num_tokens)


class HeadTrade:
    """Numbers of this rank's tokens on their way to the ranks of their heads.

    Of each token all its numbers lie side by side, tokens of all ranks one after the other.

    like: [B, T_r, N, H] on this rank. parts: type and number of tensors of that shape, the widest type first.
    num_tokens: of all ranks.
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
        self._bytes = [kinds * heads // parallel.size * self._width * dtype.itemsize for dtype, kinds in parts]
        self._sent_shape = (tokens, batch, sum(self._bytes))
        self._received_shape = (num_tokens, batch, sum(self._bytes))
        self._begin(like_BTNH)

    def _begin(self, like_BTNH: torch.Tensor) -> None:
        """Find the memory that is written to, on the device of `like_BTNH`."""
        raise NotImplementedError

    def place(self, part: int, rank: int) -> torch.Tensor:
        """Where to write the numbers for a rank's heads: [K, B, T_r, N_r, H] of the part's type."""
        raise NotImplementedError

    def send(self, part: int, x_BTNH: torch.Tensor) -> None:
        """Write a part of one tensor for all ranks."""
        for rank, x in enumerate(x_BTNH.unflatten(-2, (self._parallel.size, -1)).unbind(-3)):
            in_words(self.place(part, rank)[0]).copy_(in_words(x))

    def exchange(self) -> list[torch.Tensor]:
        """Return the received numbers, part by part: [K, B, num_tokens, N_r, H], of this rank's heads."""
        raise NotImplementedError

    def _typed(self, bytes_: torch.Tensor) -> list[torch.Tensor]:
        """[..., T, B, bytes of a token] -> of each part [K, B, T, ..., N_r, H] in its type; views."""
        pieces = bytes_.split(self._bytes, dim=-1)
        return [
            piece.view(dtype).unflatten(-1, (kinds, -1, self._width)).movedim((-3, -4, -5), (0, 1, 2))
            for piece, (dtype, kinds) in zip(pieces, self._parts, strict=True)
        ]


class CollectiveTrade(HeadTrade):
    """Packed for each rank, and sent in one all-to-all of bytes."""

    def _begin(self, like_BTNH: torch.Tensor) -> None:
        self._sent = kept_buffer("tokens sent", (self._parallel.size, *self._sent_shape), like_BTNH, torch.uint8)
        self._places = self._typed(self._sent)

    def place(self, part: int, rank: int) -> torch.Tensor:
        return self._places[part][:, :, :, rank]

    def send(self, part: int, x_BTNH: torch.Tensor) -> None:
        """As of every trade, in one pass."""
        in_words(self._places[part][0]).copy_(in_words(x_BTNH.unflatten(-2, (self._parallel.size, -1))))

    def exchange(self) -> list[torch.Tensor]:
        received = kept_buffer("heads received", self._received_shape, self._sent)
        size, tokens = self._sent.shape[:2]
        lengths = split_evenly(len(received), size)
        self._parallel.all_to_all(received, self._sent.flatten(0, 1), lengths, [tokens] * size)
        return self._typed(received)


class PeerTrade(HeadTrade):
    """Written where the other ranks read it."""

    def _begin(self, like_BTNH: torch.Tensor) -> None:
        peers, (tokens, batch, row) = self._parallel.peers, self._received_shape
        assert peers is not None
        buffers = peers.buffers("heads received", tokens * batch * row)
        self._received = [buffer.view(self._received_shape) for buffer in buffers]
        own = self._parallel.token_slice(tokens)
        self._places = [self._typed(received[own]) for received in self._received]

    def place(self, part: int, rank: int) -> torch.Tensor:
        return self._places[rank][part]

    def exchange(self) -> list[torch.Tensor]:
        self._parallel.meet()
        return self._typed(self._received[self._parallel.rank])


def _of_shape(buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of a buffer as a tensor."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[:nbytes].view(dtype).view(shape)
