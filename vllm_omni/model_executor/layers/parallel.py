# SPDX-License-Identifier: Apache-2.0
"""Where this rank stands, the collectives it may use, and where full checkpoint tensors go on it.

`ParallelContext` is handed to a model explicitly. Its ranks form one group that is used in one of two ways:

- tensor parallel: every rank has all tokens and a part of each layer's channels (heads, FFN columns);
- sequence parallel (Ulysses): every rank has all weights and a part of the tokens; around attention they trade tokens
  for heads (`head_trade.py`), so each rank attends with `heads / size` heads over the whole sequence.

Pipeline stages cut the layers; the runner, not this file, carries hidden states between stages. With a VAE stage
(`omni.vae_stage`) the pipeline's last rank holds no layer and decodes for the others.
Held by tests/model_executor/models/lingbot_world/test_lingbot_parallel.py,
tests/model_executor/layers/test_head_exchange.py and
tests/model_executor/layers/test_stage_places.py.

`StageNetwork` is the base of a network whose blocks are spread over stages and move between them.
"""

# B requests, T tokens (T_r: tokens of rank r), D channels

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs, between_graphs, kept_buffer, kept_copy
from vllm_omni.model_executor.layers.kept_memory import KeptMemory, Ring
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.peer_memory import PeerMemory


@dataclass(frozen=True)
class ParallelContext:
    """One rank's place. `group` is None exactly when `size` is 1.

    stage, num_stages: of the stages that hold layers; the VAE stage, if there is one, comes after them.
    partition: layers of each stage, () = as even as possible.
    decode_group: the same ranks as `group`, which then decode together (`omni.vae_parallel`); None = the first decodes
    alone. A group of its own: a decode may run on another CUDA stream, beside the steps, and collectives of two
    streams in one group wait for each other in the order of issue.
    encodes: whether this rank holds the text encoder; of an engine's ranks one does, and the others get its rows.
    peers: memory of sequence-parallel ranks that write into each other's; None = they can not, and use collectives.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    stage: int = 0
    num_stages: int = 1
    sequence_parallel: bool = False
    vae_stage: bool = False
    partition: tuple[int, ...] = ()
    decode_group: dist.ProcessGroup | None = None
    encodes: bool = True
    peers: PeerMemory | None = None

    @classmethod
    def from_vllm(
        cls,
        sequence_parallel: bool = False,
        vae_stage: bool = False,
        partition: Sequence[int] = (),
        vae_parallel: bool = False,
    ) -> "ParallelContext":
        """Use vLLM's tensor-parallel and pipeline-parallel groups, which the worker has initialised.

        vae_parallel: collective over all ranks of the engine; it makes a process group.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tensor, pipeline = get_tp_group(), get_pp_group()
        decode_group = None
        if vae_parallel and tensor.world_size > 1:
            decode_group = _another_group(tensor.ranks, tensor.device_group)
        trades = sequence_parallel and tensor.world_size > 1
        return cls(
            rank=tensor.rank_in_group,
            size=tensor.world_size,
            group=tensor.device_group if tensor.world_size > 1 else None,
            stage=pipeline.rank_in_group,
            num_stages=pipeline.world_size - vae_stage,
            sequence_parallel=trades,
            vae_stage=vae_stage,
            partition=tuple(partition),
            decode_group=decode_group,
            encodes=tensor.is_first_rank and pipeline.is_first_rank,
            peers=PeerMemory.of_group(tensor) if trades else None,
        )

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def is_vae_stage(self) -> bool:
        """Whether this rank holds no layer and only decodes."""
        return self.stage == self.num_stages

    @property
    def decodes(self) -> bool:
        """Whether this rank turns latents into frames, or its part of them."""
        return (self.rank == 0 or self.shares_decode) and (self.is_vae_stage if self.vae_stage else self.last_stage)

    @property
    def shares_decode(self) -> bool:
        """Whether the ranks that share layers, or stand beside each other on the VAE stage, decode together."""
        return self.decode_group is not None

    @property
    def tensor_size(self) -> int:
        """Ranks that share each layer's channels."""
        return 1 if self.sequence_parallel else self.size

    @property
    def tensor_rank(self) -> int:
        return 0 if self.sequence_parallel else self.rank

    def check_divisible(self, value: int, what: str) -> None:
        """Raise ValueError when `value` (heads, columns) does not divide over the ranks."""
        if value % self.size:
            raise ValueError(
                f"{what} = {value} does not divide over {self.size} parallel ranks; "
                f"use a degree that divides {value} for --tensor-parallel-size"
            )

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage: consecutive, as `partition` says or as even as possible, longer first.

        None on the VAE stage. Raises ValueError if `partition` does not fit.
        """
        lengths = self.lengths(num_layers)
        if len(lengths) != self.num_stages or sum(lengths) != num_layers or min(lengths) < 1:
            raise ValueError(
                f"omni.pipeline_partition {lengths} does not fit: {num_layers} layers over {self.num_stages} stages "
                "that hold layers, at least one each"
            )
        start = sum(lengths[: self.stage])
        return range(start, num_layers if self.is_vae_stage else start + lengths[self.stage])

    def lengths(self, num_layers: int) -> list[int]:
        """Return how many layers each stage holds."""
        return list(self.partition) or split_evenly(num_layers, self.num_stages)

    def token_slice(self, num_tokens: int) -> slice:
        """Return the tokens this rank works on outside attention (all of them unless sequence parallel)."""
        if not self.sequence_parallel:
            return slice(0, num_tokens)
        lengths = split_evenly(num_tokens, self.size)
        start = sum(lengths[: self.rank])
        return slice(start, start + lengths[self.rank])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over tensor-parallel ranks, in place; the identity without tensor parallelism.

        Use the result before the next of its shape: in a CUDA graph they share memory.
        """
        if self.tensor_size > 1:
            x = kept_copy("reduced", x)
            between_graphs(partial(dist.all_reduce, x, group=self.group))
        return x

    def all_gather_channels(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Join the channel parts of tensor-parallel ranks along the last dimension."""
        if self.tensor_size == 1:
            return x_TD
        return torch.cat(self._gather(x_TD), dim=-1)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, of one shape."""
        own = kept_copy("gathered", x)
        parts = [kept_buffer(f"gathered from {rank}", own.shape, own) for rank in range(self.size)]
        between_graphs(partial(dist.all_gather, parts, own, group=self.group))
        return parts

    def meet(self) -> None:
        """Where ranks write into each other's memory: nobody writes again before all have read until here."""
        if self.peers is not None:
            self.peers.meet()

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_lengths: list[int], sent_lengths: list[int]
    ) -> None:
        """Exchange rows of the first dimension: so many of each rank's arrive, so many leave for it. Kept tensors."""
        between_graphs(
            partial(dist.all_to_all_single, received, sent, received_lengths, sent_lengths, group=self.group)
        )

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, of one shape. Use them before the next call with that shape."""
        return [x] if self.size == 1 else self._gather(x)

    def gather_tokens(self, x_BTD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Join the token parts of sequence-parallel ranks: [B, T_r, D] -> [B, num_tokens, D] on every rank."""
        if not self.sequence_parallel:
            return x_BTD
        lengths = split_evenly(num_tokens, self.size)
        parts = self._gather(functional.pad(x_BTD, (0, 0, 0, lengths[0] - x_BTD.shape[1])))
        return torch.cat([part[:, :n] for part, n in zip(parts, lengths, strict=True)], dim=1)


def _another_group(ranks: Sequence[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a second `group` of the same `ranks`; every rank of the world does so at the same point, for its own."""
    everybody: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everybody, list(ranks))
    backend = dist.get_backend(group)
    made = {each: dist.new_group(each, backend=backend) for each in sorted({tuple(members) for members in everybody})}
    return made[tuple(ranks)]


def split_evenly(total: int, parts: int) -> list[int]:
    """Return `parts` lengths that sum to `total`, differ by at most one, longer first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


@dataclass(frozen=True)
class CheckpointSlot:
    """Where one full checkpoint tensor goes on this rank.

    shape: of the full tensor. target: a view into a parameter. part: the (dimension, start) of this rank's piece of
    the full tensor; None = all of it. loader: cuts out that piece and fills `target`; None = a plain copy.
    """

    shape: tuple[int, ...]
    target: torch.Tensor
    part: tuple[int, int] | None = None
    loader: Callable[[torch.Tensor], None] | None = None

    def load(self, full: torch.Tensor) -> None:
        """Copy this rank's piece. Raises ValueError on another shape."""
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
    """A module whose parameters (and its sub-modules') are parts of differently named or larger checkpoint tensors."""

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """Yield (checkpoint name, slot); `prefix` is this module's own name in the model."""
        raise NotImplementedError


def checkpoint_slots(model: nn.Module) -> dict[str, CheckpointSlot]:
    """Return a slot for every checkpoint tensor `model` needs on this rank, by checkpoint name."""
    slots: dict[str, CheckpointSlot] = {}
    spoken_for: str | None = None  # modules come with their children right behind
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
    """A weight per channel, of which each rank holds the part for its channels (the gain of a full-width norm)."""

    def __init__(self, dim: int, parallel: ParallelContext) -> None:
        super().__init__()
        self.dim = dim
        self.tensor_rank = parallel.tensor_rank
        self.weight = nn.Parameter(torch.empty(dim // parallel.tensor_size), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        start = self.tensor_rank * self.weight.shape[0]
        yield f"{prefix}.weight", CheckpointSlot((self.dim,), self.weight.data, (0, start))


class StageNetwork(nn.Module):
    """Base of a network of equal blocks. blocks: by number in the whole network. graphs: None = none are made."""

    parallel: ParallelContext
    blocks: nn.ModuleDict
    graphs: ForwardGraphs | None = None

    # -- of each network -----------------------------------------------------------------------------------------------

    @property
    def typed_weight(self) -> torch.Tensor:
        """A parameter that is always in the network's type and on its device."""
        raise NotImplementedError

    def empty_block(self, layer: int) -> nn.Module:
        """Make an empty block, by its number in the whole network, in torch's default type and device."""
        raise NotImplementedError

    # -- of all --------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.typed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.typed_weight.device

    @property
    def rings(self) -> KeptMemory[Ring] | None:
        """Where windows take their memory from; None = there are no graphs that knew it again."""
        return None if self.graphs is None else self.graphs.kept

    def forget(self) -> None:
        """Drop everything derived from weights (they were loaded anew or moved)."""
        if self.graphs is not None:
            self.graphs.forget()

    def move_layers(self, move: LayerMove) -> None:
        """Hold the blocks that this stage has after `move`, with their weights (collective)."""

        def empty(layer: int) -> nn.Module:
            with torch.device(self.device):
                block = self.empty_block(layer)
            return block.to(self.dtype).requires_grad_(False)

        self.blocks = move.modules(self.blocks, empty)
        self.parallel = replace(self.parallel, partition=move.partition)
        self.forget()
