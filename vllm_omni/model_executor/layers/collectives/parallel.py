# SPDX-License-Identifier: Apache-2.0
"""This rank's parallel layout, its collectives, and its parts of the checkpoint tensors.

A model receives a `ParallelContext` explicitly. The context's ranks form one group, which is used
in one of two ways:

- tensor parallel: every rank has all tokens and some of each layer's channels (heads, FFN columns);
- sequence parallel (Ulysses): every rank has all weights and some of the tokens. An all-to-all
  around attention (`head_all_to_all.py`) lets each rank attend with `heads / size` heads over the
  whole sequence.

Pipeline stages split the layers; the runner, not this module, sends hidden states between stages.
With a VAE stage (`omni.vae_stage`), the pipeline's last rank holds no layers and decodes the
latents that the other stages produce.

`StageNetwork` is the base class for networks whose blocks are partitioned across stages and can
move between them.
"""

# B requests, T tokens (T_r: tokens of rank r), D channels

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.collectives.peer_memory import NOT_SHARDED, PeerMemory
from vllm_omni.model_executor.layers.cuda_graphs import (
    ForwardGraphs,
    between_graphs,
    persistent_buffer,
    persistent_copy,
)
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.model_executor.layers.kv_cache.memory_pool import MemoryPool, Ring
from vllm_omni.model_executor.layers.layer_moves import LayerMove


@dataclass(frozen=True)
class ParallelContext:
    """One rank's parallel layout."""

    rank: int = 0
    """This rank's index in `group`."""
    size: int = 1
    """Number of ranks in `group`."""
    group: dist.ProcessGroup | None = None
    """Process group of the tensor-parallel or sequence-parallel ranks. None if and only if `size`
    is 1.
    """
    stage: int = 0
    """This rank's pipeline stage among the stages that have layers; the VAE stage follows these
    stages.
    """
    num_stages: int = 1
    """Number of stages that have layers."""
    sequence_parallel: bool = False
    """Whether the ranks shard tokens rather than channels."""
    vae_stage: bool = False
    """Whether the pipeline's last stage only decodes."""
    partition: tuple[int, ...] = ()
    """Number of layers on each stage. Default: the layers are distributed as evenly as possible."""
    decode_group: dist.ProcessGroup | None = None
    """A second process group of the same ranks, used when they decode together
    (`omni.vae_parallel`). The group is separate because a decode may run on another CUDA stream
    concurrently with denoise steps, and collectives in the same group are serialised in issue
    order, even across CUDA streams. None: only the first rank decodes.
    """
    encodes: bool = True
    """Whether this rank holds the text encoder. Only one of an engine's ranks holds it; the other
    ranks receive that rank's text embeddings.
    """
    peers: PeerMemory | None = None
    """Symmetric memory of sequence-parallel ranks, through which they write into each other's
    buffers. None: the ranks call collectives instead.
    """
    peer_path: FastPath = NOT_SHARDED
    """Whether `peers` exists, and the reason if it does not."""

    @classmethod
    def from_vllm(
        cls,
        sequence_parallel: bool = False,
        vae_stage: bool = False,
        partition: Sequence[int] = (),
        vae_parallel: bool = False,
    ) -> "ParallelContext":
        """Return the layout that corresponds to vLLM's tensor-parallel and pipeline-parallel
        groups, which the worker has initialised.

        Args:
            sequence_parallel: Whether the ranks shard tokens rather than channels.
            vae_stage: Whether the last pipeline stage only decodes.
            partition: Number of layers on each stage. Default: the layers are distributed as evenly
                as possible.
            vae_parallel: Whether a stage's ranks decode together. Decoding together needs an
                additional process group, whose creation makes this call collective across all of
                the engine's ranks.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tensor, pipeline = get_tp_group(), get_pp_group()
        decode_group = None
        if vae_parallel and tensor.world_size > 1:
            decode_group = _another_group(tensor.ranks, tensor.device_group)
        transfers = sequence_parallel and tensor.world_size > 1
        peers, peer_path = PeerMemory.of_group(tensor) if transfers else (None, NOT_SHARDED)
        return cls(
            rank=tensor.rank_in_group,
            size=tensor.world_size,
            group=tensor.device_group if tensor.world_size > 1 else None,
            stage=pipeline.rank_in_group,
            num_stages=pipeline.world_size - vae_stage,
            sequence_parallel=transfers,
            vae_stage=vae_stage,
            partition=tuple(partition),
            decode_group=decode_group,
            encodes=tensor.is_first_rank and pipeline.is_first_rank,
            peers=peers,
            peer_path=peer_path,
        )

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def is_vae_stage(self) -> bool:
        """Return whether this rank has no layers and only decodes."""
        return self.stage == self.num_stages

    @property
    def decodes(self) -> bool:
        """Return whether this rank decodes latents to frames, completely or in part."""
        return (self.rank == 0 or self.shares_decode) and (
            self.is_vae_stage if self.vae_stage else self.last_stage
        )

    @property
    def shares_decode(self) -> bool:
        """Return whether one stage's ranks decode together."""
        return self.decode_group is not None

    @property
    def tensor_size(self) -> int:
        """Return the number of ranks that shard each layer's channels."""
        return 1 if self.sequence_parallel else self.size

    @property
    def tensor_rank(self) -> int:
        return 0 if self.sequence_parallel else self.rank

    def check_divisible(self, value: int, what: str) -> None:
        """Raise ValueError if `value` (heads, columns) is not divisible by the number of ranks."""
        if value % self.size:
            raise ValueError(
                f"{what} = {value} does not divide over {self.size} parallel ranks; "
                f"use a degree that divides {value} for --tensor-parallel-size"
            )

    def layers(self, num_layers: int) -> range:
        """Return this stage's consecutive layers, or an empty range on the VAE stage.

        The layers follow `partition`, or are distributed as evenly as possible with longer stages
        first.

        Raises:
            ValueError: `partition` does not match the number of layers or stages.
        """
        lengths = self.lengths(num_layers)
        if len(lengths) != self.num_stages or sum(lengths) != num_layers or min(lengths) < 1:
            raise ValueError(
                f"omni.pipeline_partition {lengths} does not fit: {num_layers} layers over "
                f"{self.num_stages} stages "
                "that hold layers, at least one each"
            )
        start = sum(lengths[: self.stage])
        return range(start, num_layers if self.is_vae_stage else start + lengths[self.stage])

    def lengths(self, num_layers: int) -> list[int]:
        """Return the number of layers on each stage."""
        return list(self.partition) or split_evenly(num_layers, self.num_stages)

    def token_slice(self, num_tokens: int) -> slice:
        """Return the slice of tokens that this rank processes outside attention. Without sequence
        parallelism, the slice covers all tokens.
        """
        if not self.sequence_parallel:
            return slice(0, num_tokens)
        lengths = split_evenly(num_tokens, self.size)
        start = sum(lengths[: self.rank])
        return slice(start, start + lengths[self.rank])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` across the tensor-parallel ranks, which may be computed in place.
        Without tensor parallelism, `x` is returned unchanged.

        Use the result before the next all-reduce of the same shape, because in a CUDA graph both
        all-reduces write to the same memory.
        """
        if self.tensor_size > 1:
            x = persistent_copy("reduced", x)
            between_graphs(partial(dist.all_reduce, x, group=self.group))
        return x

    def all_gather_channels(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensor-parallel ranks' channels along the last dimension."""
        if self.tensor_size == 1:
            return x_TD
        return torch.cat(self._gather(x_TD), dim=-1)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `x`. All tensors must have the same shape."""
        own = persistent_copy("gathered", x)
        parts = [
            persistent_buffer(f"gathered from {rank}", own.shape, own) for rank in range(self.size)
        ]
        between_graphs(partial(dist.all_gather, parts, own, group=self.group))
        return parts

    def barrier(self) -> None:
        """Make later kernels wait for the other ranks if the ranks write into each other's memory
        (`peers`).

        Without this barrier, a rank could overwrite a buffer that another rank has not read yet.
        """
        if self.peers is not None:
            self.peers.barrier()

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: list[int],
        sent_lengths: list[int],
    ) -> None:
        """Exchange slices along the first dimension with all ranks.

        Args:
            received: Receive buffer. The buffer must have the same address in each call.
            sent: Send buffer. The buffer must have the same address in each call.
            received_lengths: Length received from each rank.
            sent_lengths: Length sent to each rank.
        """
        between_graphs(
            partial(
                dist.all_to_all_single,
                received,
                sent,
                received_lengths,
                sent_lengths,
                group=self.group,
            )
        )

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `x`, by rank. All tensors must have the same shape. Use the results
        before the next call with the same shape.
        """
        return [x] if self.size == 1 else self._gather(x)

    def gather_tokens(self, x_BTD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All-gather the sequence-parallel ranks' tokens: [B, T_r, D] -> [B, num_tokens, D] on
        every rank.
        """
        if not self.sequence_parallel:
            return x_BTD
        lengths = split_evenly(num_tokens, self.size)
        parts = self._gather(functional.pad(x_BTD, (0, 0, 0, lengths[0] - x_BTD.shape[1])))
        return torch.cat([part[:, :n] for part, n in zip(parts, lengths, strict=True)], dim=1)


def _another_group(ranks: Sequence[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create a second `group` of the same `ranks`. The call is collective across all ranks of the
    world; each rank passes its own group.
    """
    everybody: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everybody, list(ranks))
    backend = dist.get_backend(group)
    made = {
        each: dist.new_group(each, backend=backend)
        for each in sorted({tuple(members) for members in everybody})
    }
    return made[tuple(ranks)]


def split_evenly(total: int, parts: int) -> list[int]:
    """Return `parts` lengths that sum to `total` and differ by at most one, longer lengths
    first.
    """
    return [total // parts + (index < total % parts) for index in range(parts)]


@dataclass(frozen=True)
class CheckpointSlot:
    """Describes which part of a checkpoint tensor this rank holds, and which memory receives it."""

    shape: tuple[int, ...]
    """The full tensor's shape."""
    target: torch.Tensor
    """View into the parameter that receives this rank's part."""
    part: tuple[int, int] | None = None
    """(dimension, start) of this rank's part in the full tensor. None: the whole tensor."""
    loader: Callable[[torch.Tensor], None] | None = None
    """Function that extracts this rank's part of a full tensor and fills `target`. None: this
    rank's part is copied."""

    def load(self, full: torch.Tensor) -> None:
        """Copy this rank's part of `full` into `target`.

        Raises:
            ValueError: The shape of `full` differs from `shape`.
        """
        if tuple(full.shape) != self.shape:
            raise ValueError(f"has shape {tuple(full.shape)}, expected {self.shape}")
        if self.loader is not None:
            self.loader(full)
            return
        if self.part is not None:
            dim, start = self.part
            full = full.narrow(dim, start, self.target.shape[dim])
        with torch.no_grad():
            self.target.copy_(full)


class ShardedModule(nn.Module):
    """A module whose parameters are parts of differently named or larger checkpoint tensors."""

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """Yield (checkpoint name, slot). `prefix` is this module's name in the model."""
        raise NotImplementedError


def checkpoint_slots(model: nn.Module) -> dict[str, CheckpointSlot]:
    """Return a slot for every checkpoint tensor that `model` needs on this rank, by checkpoint
    name.
    """
    slots: dict[str, CheckpointSlot] = {}
    spoken_for: str | None = None  # prefix of a module whose children follow it directly
    for prefix, module in model.named_modules():
        if spoken_for is not None and prefix.startswith(spoken_for):
            continue
        if isinstance(module, ShardedModule):
            slots.update(module.slots(prefix))
            spoken_for = f"{prefix}."
        else:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                slots[name] = CheckpointSlot(tuple(parameter.shape), parameter.data)
    return slots


class ChannelWeight(ShardedModule):
    """A per-channel weight, sharded by channel (for example the gain of a norm over the full
    width).
    """

    def __init__(self, dim: int, parallel: ParallelContext) -> None:
        super().__init__()
        self.dim = dim
        self.tensor_rank = parallel.tensor_rank
        self.weight = nn.Parameter(torch.empty(dim // parallel.tensor_size), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        start = self.tensor_rank * self.weight.shape[0]
        yield f"{prefix}.weight", CheckpointSlot((self.dim,), self.weight.data, (0, start))


class StageNetwork(nn.Module):
    """Base class for networks of identical blocks that are partitioned across pipeline stages."""

    parallel: ParallelContext
    """This rank's parallel layout."""
    blocks: nn.ModuleDict
    """This rank's blocks, by their index in the whole network."""
    graphs: ForwardGraphs | None = None
    """The network's CUDA graphs. None: CUDA graphs are disabled."""

    # -- implemented by each network ---------------------------------------------------------------

    @property
    def typed_weight(self) -> torch.Tensor:
        """A parameter that always has the network's dtype and device."""
        raise NotImplementedError

    def empty_block(self, layer: int) -> nn.Module:
        """Build the block with this index in the whole network, without loading its weights, with
        torch's default dtype and device.
        """
        raise NotImplementedError

    # -- shared by all networks --------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.typed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.typed_weight.device

    @property
    def rings(self) -> MemoryPool[Ring] | None:
        """The K/V memory pool. None if CUDA graphs are disabled, because only CUDA graphs benefit
        from reused memory.
        """
        return None if self.graphs is None else self.graphs.pool

    def clear_derived(self) -> None:
        """Invalidate all values derived from weights, because the weights were reloaded or
        moved.
        """
        if self.graphs is not None:
            self.graphs.clear_graphs()

    def move_layers(self, move: LayerMove) -> None:
        """Exchange blocks with other stages, so that this stage holds the blocks that `move`
        assigns to it. The call is collective.
        """

        def empty(layer: int) -> nn.Module:
            with torch.device(self.device):
                block = self.empty_block(layer)
            return block.to(self.dtype).requires_grad_(False)

        self.blocks = move.modules(self.blocks, empty)
        self.parallel = replace(self.parallel, partition=move.partition)
        self.clear_derived()
