# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline stages: tensors to the next stage, and the return channel.

**Forward.** vLLM's worker sends one dict of tensors from stage to stage. The dict contains hidden
states or, for a VAE stage, a `StageNote` and final latents. vLLM assumes that all tensor-parallel
ranks hold the same tensors: if the length of a tensor is divisible by the number of ranks, each
rank sends a shard, and the receivers all-gather the shards. This all-gather would produce wrong
tensors with sequence parallelism, where each rank has its own tokens, and is impossible for host
tensors. `together` therefore pads its buffers to a length that is not divisible by the number of
ranks.

**Back.** After every micro-step, the last stage with layers sends one message per batch to each
earlier stage (`ReturnChannel`). The message contains a status (1 = OK, 0 = failed) and the latents
of every request. An earlier stage needs the latents to start the request's next step, and the
status to commit the chunk. The channel has a separate process group. NCCL would put both directions
of a shared group on one stream, so no batch could be sent forward before the message about the
previous batch had been received. Messages flow only from the last stage to earlier stages and in
batch order, so a FIFO of posted receives is sufficient.

CUDA does not guarantee concurrency between streams: streams that share a hardware queue wait for
each other. Every rank therefore issues its transfers in batch order, and for each batch it issues
the hidden states before the return message. In this order, a transfer waits only for earlier
transfers. For this reason, `listen` posts the receives for return messages after the hidden states
have been sent.
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
"""Key of the hidden states of all batches, as packed by `together`."""
_NOTE = "note"
_LATENTS = "latents"
_STATUS_OK = 1.0

# -- forward ---------------------------------------------------------------------------------------


class ChunkNote(msgspec.Struct, frozen=True):
    """State of one chunk after a step."""

    request_id: str
    """Id of the chunk's request."""
    committed: int
    """Number of other chunks that have been committed to the session."""
    step: int
    """Number of steps that the chunk has finished."""
    num_steps: int
    """Total number of steps that the chunk needs."""
    clean: bool
    """Whether the latents are final. Final latents are sent together with the note."""
    done: bool
    """Whether the ranks with layers have committed the chunk."""
    info: dict[str, Any] = {}
    """Model-specific data that is sent together with final latents; empty if the latents are not
    final.
    """
    timings_ms: dict[str, list[float]] = {}
    """Stage timings of the ranks with layers in milliseconds; empty until the chunk is `done`."""


class StageNote(msgspec.Struct, frozen=True):
    """Message from the last stage with layers to the VAE stage after a step."""

    chunks: list[ChunkNote] = []
    """Chunks that ran the step and have not failed."""
    failures: dict[str, tuple[str, str]] = {}
    """Error code and message of each failed request, keyed by request id."""

    def message(self, latents: Sequence[torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
        """Return this note and the final latents as tensors to send.

        Args:
            latents: Latents of the `chunks` that are `clean`, in order.
            ranks: Number of ranks that share the layers of a stage.
        """
        text = msgspec.json.encode(self)
        text += b" " * padding(len(text), ranks)
        return {
            _NOTE: torch.frombuffer(bytearray(text), dtype=torch.uint8),
            **together(_LATENTS, latents, ranks),
        }

    @classmethod
    def read_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "StageNote":
        return msgspec.json.decode(tensors[_NOTE].numpy().tobytes(), type=cls)

    @property
    def taking_part(self) -> set[str]:
        """Ids of the requests whose chunks ran this step and have not failed."""
        return {chunk.request_id for chunk in self.chunks}

    def latents(self, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the final latents of the `chunks` that are `clean`, keyed by request id."""
        clean = [chunk.request_id for chunk in self.chunks if chunk.clean]
        return dict(zip(clean, unpack(_LATENTS, received), strict=True))

    def failure(self, request_id: str) -> RequestFailed | None:
        known = self.failures.get(request_id)
        return None if known is None else RequestFailed(*known)


def padding(length: int, ranks: int) -> int:
    """Return how many elements must be appended to a tensor so that vLLM does not send it in
    shards.

    Args:
        length: Number of elements in the tensor.
        ranks: Number of ranks that share layers.
    """
    return -length % ranks + 1 if ranks > 1 else 0


def together(name: str, tensors: Sequence[torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    """Pack tensors of the same dtype so that each rank sends its own tensors to its counterpart.

    The result contains two tensors for any number of inputs, because vLLM's CPU ranks can send at
    most eight tensors.

    Args:
        name: Key of the packed tensors.
        tensors: Tensors to pack.
        ranks: Number of ranks that share layers.
    """
    if not tensors:
        return {}
    flat = (
        torch.cat([tensor.reshape(-1) for tensor in tensors])
        if len(tensors) > 1
        else tensors[0].reshape(-1)
    )
    if ranks > 1 and flat.numel() % ranks == 0:
        flat = torch.cat((flat, flat.new_zeros(padding(flat.numel(), ranks))))
    numbers = [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]
    numbers += [-1] * padding(len(numbers), ranks)
    return {name: flat, f"{name}.shapes": torch.tensor(numbers, dtype=torch.int64)}


def unpack(name: str, received: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that `together` packed, as views of one buffer."""
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
    """Send one element along vLLM's path from stage to stage (collective in the pipeline group).

    NCCL creates the communicator for a pair of ranks on first use, and may have to wait for the
    device to do so. The first use must therefore precede all transfers.

    Args:
        pp: Pipeline group.
        device: Device of the transfers.
    """
    token = torch.ones(1, device=device)
    if not pp.is_first_rank:
        dist.recv(token, src=pp.prev_rank, group=pp.device_group)
    if not pp.is_last_rank:
        dist.send(token, dst=pp.next_rank, group=pp.device_group)


@dataclass
class _Receive:
    """A posted receive for a return message."""

    requests: list[DiffusionRequest]
    """Requests of the batch that the message is about."""
    numels: list[int]
    """Number of elements in the latents of each request."""
    buffer: torch.Tensor
    """Buffer for statuses and latents. It is valid once `work` is done."""
    work: Any
    """Handle of the receive operation."""


class ReturnChannel:
    """One rank's end of the return channel. All ranks of the engine must construct one
    (collective).

    Args:
        pp_ranks: Global ranks with layers in this rank's pipeline, in stage order. A rank that is
            not among them (a rank of a VAE stage) only takes part in the construction.
        device: Device of the transfers.
    """

    def __init__(self, pp_ranks: Sequence[int], device: torch.device) -> None:
        self._ranks = list(pp_ranks)
        self._device = device
        self._stage = self._ranks.index(dist.get_rank()) if dist.get_rank() in self._ranks else -1
        columns: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(columns, self._ranks)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._groups: dict[int, Any] = {}
        # There is one group of two ranks for each pipeline (column) and each of its earlier stages,
        # so that the messages of different pairs do not wait for each other.
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
        """Send one element between each pair of ranks, so that NCCL creates their communicators."""
        token = torch.ones(1, device=self._device)
        for stage, group in sorted(self._groups.items()):
            if self.is_last:
                dist.send(token, dst=self._ranks[stage], group=group)
            else:
                dist.recv(token, src=self._ranks[-1], group=group)

    def send(
        self,
        requests: Sequence[DiffusionRequest],
        ok: Sequence[bool],
        latents: Sequence[torch.Tensor],
    ) -> None:
        """Send the statuses and latents of one batch to every earlier stage, without waiting.

        Only the last stage calls this method.

        Args:
            requests: Requests of the batch.
            ok: Whether each request has succeeded.
            latents: Latents of each request.
        """
        assert self.is_last and len(requests) == len(ok) == len(latents)
        status = torch.tensor([_STATUS_OK if fine else 0.0 for fine in ok], dtype=torch.float32)
        message = torch.cat(
            [status.to(self._device, non_blocking=True), *(x.float().flatten() for x in latents)]
        )
        works = [
            dist.isend(message, dst=self._ranks[stage], group=group)
            for stage, group in sorted(self._groups.items())
        ]
        self._sends.append((message, works))
        while self._sends and all(work.is_completed() for work in self._sends[0][1]):
            self._sends.popleft()  # frees the buffer, which had to exist until it was sent

    def expect(self, requests: Sequence[DiffusionRequest]) -> None:
        """Register a batch whose return message is expected.

        The stages before the last one call this method after the forward pass of the batch.
        """
        assert not self.is_last
        self._expected.append(list(requests))

    def listen(self, model: SupportsStepExecution) -> None:
        """Post the receives for return messages.

        The stages before the last one call this method after hidden states have been sent.
        """
        for requests in self._expected:
            numels = [model.latents(request).numel() for request in requests]
            buffer = torch.empty(
                len(numels) + sum(numels), dtype=torch.float32, device=self._device
            )
            work = dist.irecv(buffer, src=self._ranks[-1], group=self._groups[self._stage])
            self._pending.append(_Receive(requests, numels, buffer, work))
        self._expected.clear()

    def drain(
        self,
        request_ids: Iterable[str],
        apply: Callable[[DiffusionRequest, bool, torch.Tensor], None],
    ) -> None:
        """Apply all return messages up to and including the latest message about one of the given
        requests.

        The outputs of these batches have reached the engine or are certain to be sent, so this
        method never waits for a batch that has not been sent to the last stage.

        Args:
            request_ids: Ids of the requests whose state must be up to date.
            apply: Function that is called with each request, whether the request has succeeded, and
                the request's latents.
        """
        assert not self._expected, "listen() must post a batch's receive before the next batch"
        wanted = set(request_ids)
        while any(
            request.request_id in wanted
            for receive in self._pending
            for request in receive.requests
        ):
            receive = self._pending.popleft()
            receive.work.wait()
            requests = receive.requests
            # Reading the statuses synchronises with the device, so they are read only if a chunk
            # may be committed.
            final = any(request.step >= request.num_steps for request in requests)
            status = (
                receive.buffer[: len(requests)].tolist() if final else [_STATUS_OK] * len(requests)
            )
            parts = receive.buffer[len(requests) :].split(receive.numels)
            for request, value, part in zip(requests, status, parts, strict=True):
                apply(request, value == _STATUS_OK, part)
