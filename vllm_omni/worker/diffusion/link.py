# SPDX-License-Identifier: Apache-2.0
"""The link between pipeline stages: the tensors that go forward, and the channel on which answers come back.

**Forward**, vLLM's worker carries one dict of tensors from stage to stage: hidden states, or on the way to a VAE stage
a `StageNote` with final latents. It assumes that tensor-parallel ranks hold the same tensors: one whose length divides
by their number travels in shards, one from each rank, joined at the other side. Under sequence parallelism each rank
has tokens of its own, and a host tensor cannot be joined at all. So `together` pads its buffers to a length that does
not divide.

**Back**, after every micro-step, the last stage with layers sends each earlier one a message per batch
(`ReturnChannel`): for every request a status (1 = fine, 0 = failed) and its latents. An earlier stage needs the latents
to start the request's next step and the status to commit the chunk. The channel has a process group of its own: in one,
NCCL would put both directions into one stream, and no batch could be handed on before the answer to the last. Messages
flow one way only (last -> earlier) and in batch order, so a FIFO of posted receives is all the bookkeeping.

CUDA promises no concurrency between streams either: where two share a hardware queue, the later one waits. So every
rank issues its exchanges in batch order, and for each batch hidden states before the answer: an exchange then only
waits for an earlier one. Receives of answers (`listen`) are therefore posted after the hidden states that they answer
have been sent. Held by tests/worker/test_pipeline_parallel.py, test_return_channel.py,
test_stage_messages.py there, tests/engine/test_exchange_order.py and tests/engine/test_parallel.py.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution
from vllm_omni.outputs import RequestFailed

HIDDEN = "hidden"
"""Hidden states of one batch after the other, packed by `together`."""
_NOTE = "note"
_LATENTS = "latents"
_STATUS_OK = 1.0

# -- forward ---------------------------------------------------------------------------------------


class ChunkNote(msgspec.Struct, frozen=True):
    """Where one chunk stands after a step. committed: how many other chunks its session has had by now.

    clean: its latents are final and travel beside this note; `facts` are the model's.
    done: the chunk is committed on the ranks that hold layers; `timings_ms` are their stage timings.
    """

    request_id: str
    committed: int
    step: int
    num_steps: int
    clean: bool
    done: bool
    facts: dict[str, Any] = {}
    timings_ms: dict[str, list[float]] = {}


class StageNote(msgspec.Struct, frozen=True):
    """Message from the last stage with layers to the VAE stage after a step. failures: request -> (code, message)."""

    chunks: list[ChunkNote] = []
    failures: dict[str, tuple[str, str]] = {}

    def message(self, latents: Sequence[torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
        """The tensors to send. latents: of the clean `chunks`, in order. ranks: number that share a stage's layers."""
        text = msgspec.json.encode(self)
        text += b" " * padding(len(text), ranks)
        return {_NOTE: torch.frombuffer(bytearray(text), dtype=torch.uint8), **together(_LATENTS, latents, ranks)}

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> "StageNote":
        return msgspec.json.decode(tensors[_NOTE].numpy().tobytes(), type=cls)

    @property
    def taking_part(self) -> set[str]:
        """The requests with a chunk that took this step, and has not failed."""
        return {chunk.request_id for chunk in self.chunks}

    def latents(self, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Request id -> final latents, of the clean `chunks`."""
        clean = [chunk.request_id for chunk in self.chunks if chunk.clean]
        return dict(zip(clean, unpack(_LATENTS, received), strict=True))

    def failure(self, request_id: str) -> RequestFailed | None:
        known = self.failures.get(request_id)
        return None if known is None else RequestFailed(*known)


def padding(length: int, ranks: int) -> int:
    """Elements to append to a tensor of `length`, so that `ranks` ranks do not send it in shards."""
    return -length % ranks + 1 if ranks > 1 else 0


def together(name: str, tensors: Sequence[torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    """Any number of tensors of one type under `name`, such that each of `ranks` ranks sends its own to its counterpart.

    However many, they travel as two: vLLM's CPU ranks hand over eight at most.
    """
    if not tensors:
        return {}
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
    if ranks > 1 and flat.numel() % ranks == 0:
        flat = torch.cat((flat, flat.new_zeros(padding(flat.numel(), ranks))))
    numbers = [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]
    numbers += [-1] * padding(len(numbers), ranks)
    return {name: flat, f"{name}.shapes": torch.tensor(numbers, dtype=torch.int64)}


def unpack(name: str, received: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors packed by `together`, as views of one buffer."""
    if name not in received:
        return []
    numbers = [number for number in received[f"{name}.shapes"].tolist() if number >= 0]
    found, start, flat = [], 0, received[name]
    while numbers:
        dims, numbers = numbers[0], numbers[1:]
        shape, numbers = torch.Size(numbers[:dims]), numbers[dims:]
        found.append(flat[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return found


# -- back ------------------------------------------------------------------------------------------


def connect_forward(pp: GroupCoordinator, device: torch.device) -> None:
    """Exchange one element along vLLM's own way from stage to stage. Collective in the pipeline group.

    NCCL creates a pair's communicator on first use, which can wait for the device, so do it before any transfer is in
    flight.
    """
    token = torch.ones(1, device=device)
    if not pp.is_first_rank:
        dist.recv(token, src=pp.prev_rank, group=pp.device_group)
    if not pp.is_last_rank:
        dist.send(token, dst=pp.next_rank, group=pp.device_group)


@dataclass
class _Receive:
    """A posted receive: filled when `work` is done."""

    requests: list[DiffusionRequest]
    numels: list[int]
    buffer: torch.Tensor
    work: Any


class ReturnChannel:
    """One rank's end of the return channel. Collective: every rank of the world constructs it at the same point.

    pp_ranks: the global ranks of this rank's pipeline that hold layers, first stage first; a rank outside them (a VAE
    stage) takes part in the construction only.
    """

    def __init__(self, pp_ranks: Sequence[int], device: torch.device) -> None:
        self._ranks = list(pp_ranks)
        self._device = device
        self._stage = self._ranks.index(dist.get_rank()) if dist.get_rank() in self._ranks else -1
        columns: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(columns, self._ranks)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._groups: dict[int, Any] = {}
        # One two-member group per (column, earlier stage): no message of one pair waits behind another's.
        for column in sorted({tuple(column) for column in columns}):
            for stage, rank in enumerate(column[:-1]):
                group = dist.new_group([rank, column[-1]], backend=backend)
                if dist.get_rank() in (rank, column[-1]):
                    self._groups[stage] = group
        self._expected: list[list[DiffusionRequest]] = []
        self._pending: deque[_Receive] = deque()
        self._sends: deque[tuple[torch.Tensor, list[Any]]] = deque()
        self._connect()

    @property
    def is_last(self) -> bool:
        return self._stage == len(self._ranks) - 1

    def _connect(self) -> None:
        """Exchange one element per pair: NCCL makes a pair's communicator when both ends are present."""
        token = torch.ones(1, device=self._device)
        for stage, group in sorted(self._groups.items()):
            if self.is_last:
                dist.send(token, dst=self._ranks[stage], group=group)
            else:
                dist.recv(token, src=self._ranks[-1], group=group)

    def send(self, requests: Sequence[DiffusionRequest], ok: Sequence[bool], latents: Sequence[torch.Tensor]) -> None:
        """Last stage, after one batch: statuses and latents to every earlier stage; does not wait for them."""
        assert self.is_last and len(requests) == len(ok) == len(latents)
        status = torch.tensor([_STATUS_OK if fine else 0.0 for fine in ok], dtype=torch.float32)
        message = torch.cat([status.to(self._device, non_blocking=True), *(x.float().flatten() for x in latents)])
        works = [
            dist.isend(message, dst=self._ranks[stage], group=group) for stage, group in sorted(self._groups.items())
        ]
        self._sends.append((message, works))
        while self._sends and all(work.is_completed() for work in self._sends[0][1]):
            self._sends.popleft()  # the buffer must live until the send is done

    def expect(self, requests: Sequence[DiffusionRequest]) -> None:
        """Earlier stage, after a batch's forward: register the batch for its answer."""
        assert not self.is_last
        self._expected.append(list(requests))

    def listen(self, model: SupportsStepExecution) -> None:
        """Earlier stage, once hidden states have been sent: post the receives of the answers to them."""
        for requests in self._expected:
            numels = [model.latents(request).numel() for request in requests]
            buffer = torch.empty(len(numels) + sum(numels), dtype=torch.float32, device=self._device)
            work = dist.irecv(buffer, src=self._ranks[-1], group=self._groups[self._stage])
            self._pending.append(_Receive(requests, numels, buffer, work))
        self._expected.clear()

    def drain(
        self,
        request_ids: Iterable[str],
        apply: Callable[[DiffusionRequest, bool, torch.Tensor], None],
    ) -> None:
        """Apply every answer up to the newest that concerns one of `request_ids`.

        These batches' outputs have reached the engine (or are certain to be sent), so this never waits for a batch that
        has not been sent to the last stage.
        """
        assert not self._expected, "listen() posts a batch's receive before the next batch"
        wanted = set(request_ids)
        while any(request.request_id in wanted for receive in self._pending for request in receive.requests):
            receive = self._pending.popleft()
            receive.work.wait()
            requests = receive.requests
            # Reading the statuses waits for the device, so do it only where a chunk may be committed.
            final = any(request.step >= request.num_steps for request in requests)
            status = receive.buffer[: len(requests)].tolist() if final else [_STATUS_OK] * len(requests)
            parts = receive.buffer[len(requests) :].split(receive.numels)
            for request, value, part in zip(requests, status, parts, strict=True):
                apply(request, value == _STATUS_OK, part)
