# SPDX-License-Identifier: Apache-2.0
"""`HiddenStateCollector`: copies the requested hidden states of a step into the runner's output.

The collector stores each request's `HiddenStatesRequest` from the request's first step until the
request ends, and copies the requested hidden states of each step to the host. The collector does
not depend on the runner generation: a mixin (`ar/runner.py`) passes one `StepHiddenStates` per
step. If no request asks for hidden states, the collector only checks an empty dict in each step and
allocates no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_omni.compat import WrapsAsyncOutput
from vllm_omni.hidden_states import HiddenStatesRequest
from vllm_omni.outputs import RequestFailed, pack_error


@dataclass(frozen=True)
class StepHiddenStates:
    """Location of each request's hidden states in the model output of a step, before sampling."""

    req_ids: Sequence[str]
    """Request ids in batch order."""
    offsets: Sequence[int]
    """Index of the first row of each request, followed by the total number of rows,
    `[num_reqs + 1]`."""
    num_computed: Sequence[int]
    """Number of tokens that each request has in the K/V cache before this step. The number is exact
    during prefill."""
    num_drafts: Mapping[str, int]
    """Number of speculated tokens at the end of a request's rows, keyed by request id."""
    sources: Mapping[int, torch.Tensor]
    """Hidden states `[>= num_rows, hidden_size]`, keyed by layer index. Rows after the last offset
    are padding."""


@dataclass(frozen=True)
class _Requested:
    """A request that asks for hidden states."""

    request: HiddenStatesRequest
    """Which hidden states the client requested."""
    prompt_len: int
    """Number of tokens in the prompt."""


class HiddenStateCollector:
    """Tracks the requests that need hidden states, and copies the requested hidden states of each
    step. Every rank has one collector.

    Args:
        num_layers: Number of blocks in the model.
        layers: Indices of the available layers. The index of the last layer is `num_layers`.
        refusal: Reason why this configuration cannot return hidden states, or None if it can.
        copies: Whether this rank copies hidden states. Only ranks whose output reaches a scheduler
            do; all other ranks only track requests.
    """

    def __init__(
        self,
        num_layers: int,
        layers: Sequence[int],
        refusal: str | None = None,
        *,
        copies: bool = True,
    ) -> None:
        self.num_layers = num_layers
        self.layers = frozenset(layers)
        self.refusal = refusal
        self.copies = copies
        self.bytes_copied = 0
        """Number of bytes copied from the model's output to the host since startup."""
        self._requested: dict[str, _Requested] = {}
        self._failed: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def __bool__(self) -> bool:
        return bool(self._requested or self._failed)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Register requests that start with this step, and remove requests that have finished."""
        if self._requested or self._failed:
            for req_id in scheduler_output.finished_req_ids:
                self._requested.pop(req_id, None)
                self._failed.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is None or not new.sampling_params.extra_args:
                continue
            try:
                request = HiddenStatesRequest.from_extra_args(new.sampling_params.extra_args)
                if request is not None:
                    self._check(request)
                    self._requested[new.req_id] = _Requested(request, new.prompt_len)
            except RequestFailed as failed:
                self._failed[new.req_id] = pack_error(failed.code, failed.message)

    def _check(self, request: HiddenStatesRequest) -> None:
        if self.refusal is not None:
            raise RequestFailed("unsupported", self.refusal)
        for layer in request.layers:
            if not -self.num_layers - 1 <= layer <= self.num_layers:
                raise RequestFailed(
                    "unsupported_layer",
                    f"layer {layer}: the model has {self.num_layers} blocks, layers are 0 "
                    "(embeddings) to "
                    f"{self.num_layers} (after the final norm), or -1 for the last",
                )
            if self._source(layer) not in self.layers:
                raise RequestFailed(
                    "unsupported_layer",
                    f"layer {layer} is not available; this engine provides {sorted(self.layers)}: "
                    "configure more with "
                    '--additional-config \'{"omni": {"hidden_state_layers": [...]}}\'',
                )

    def _source(self, layer: int) -> int:
        return layer if layer >= 0 else self.num_layers + 1 + layer

    def copy_step(self, step: StepHiddenStates) -> "CopiedHiddenStates":
        """Start copying the requested hidden states of a step, before the next step overwrites
        them.

        Hidden states of requests that ask for the same layers are copied together.
        """
        wanted: dict[tuple[int, ...], list[_Slice]] = {}
        errors: dict[int, torch.Tensor] = {}
        for i, req_id in enumerate(step.req_ids):
            if (failed := self._failed.get(req_id)) is not None:
                errors[i] = failed
            elif (requested := self._requested.get(req_id)) is not None:
                count = step.offsets[i + 1] - step.offsets[i]
                drafts = step.num_drafts.get(req_id, 0)
                skip = _positions_to_skip(requested, step.num_computed[i], count, drafts)
                if skip < count:
                    part = _Slice(
                        i,
                        step.offsets[i] + skip,
                        step.offsets[i + 1],
                        drafts,
                        requested.request.hidden_states,
                    )
                    wanted.setdefault(requested.request.layers, []).append(part)
        groups = []
        if self.copies:
            for layers, slices in wanted.items():
                copy = _Copy(
                    [step.sources[self._source(k)] for k in layers], slices, self._copy_stream(step)
                )
                groups.append((copy, slices))
                self.bytes_copied += copy.nbytes
        return CopiedHiddenStates(len(step.req_ids), groups, errors)

    def _copy_stream(self, step: StepHiddenStates) -> torch.cuda.Stream | None:
        """Return the CUDA stream for copies to the host, or None on a CPU. The stream is created on
        first use.
        """
        if self._stream is None and next(iter(step.sources.values())).is_cuda:
            self._stream = torch.cuda.Stream()
        return self._stream


@dataclass(frozen=True)
class _Slice:
    """Hidden states of one request in the batch: rows `[start, end)` of the model's output."""

    index: int
    """Index of the request in the batch."""
    start: int
    """Index of the first row."""
    end: int
    """Index after the last row."""
    drafts: int
    """Number of rows at the end that belong to speculated tokens."""
    mode: str
    """Tokens whose hidden states the client requested: `HiddenStatesRequest.hidden_states`."""


def _positions_to_skip(requested: _Requested, num_computed: int, count: int, drafts: int) -> int:
    """Return how many of a request's leading rows in this step the client did not request."""
    if requested.request.hidden_states == "all":
        return 0
    if requested.request.hidden_states == "generated":
        return max(0, requested.prompt_len - num_computed)
    if num_computed + count < requested.prompt_len:
        return count  # the step computes a part of the prompt that does not contain its last token
    return count - 1 - drafts


class _Copy:
    """Host copy of the hidden states of all requests that ask for the same layers.

    The copy is a tensor `[num_rows, num_layers, hidden_size]`.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        slices: Sequence[_Slice],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Start the copy.

        Args:
            sources: Hidden states of each layer.
            slices: Rows to copy.
            stream: CUDA stream for the copy to the host; None if the sources are on the host.
        """
        layers = [
            torch.cat([source[part.start : part.end] for part in slices]) for source in sources
        ]
        device_states = layers[0].unsqueeze(1) if len(layers) == 1 else torch.stack(layers, dim=1)
        self.nbytes = device_states.nbytes
        self._device_states: torch.Tensor | None = device_states
        self._done: torch.cuda.Event | None = None
        if stream is None:
            self._host_states = device_states
            return
        # The copy runs after the gather, concurrently with the next step. The host can continue
        # meanwhile, because the memory is page-locked.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host_states = device_states.to("cpu", non_blocking=True)
            self._done = torch.cuda.Event(blocking=True)
            self._done.record(stream)

    def wait(self) -> torch.Tensor:
        if self._done is not None:
            self._done.synchronize()
        self._device_states = None
        return self._host_states


@dataclass(frozen=True)
class CopiedHiddenStates:
    """Requested hidden states of one step, stored until the sampled tokens are known."""

    _num_reqs: int
    """Number of requests in the batch."""
    _groups: list[tuple[_Copy, list[_Slice]]]
    """Copies to the host, each with the requests whose hidden states it contains."""
    _errors: dict[int, torch.Tensor]
    """Error envelopes of failed requests, keyed by batch index."""

    def attach_to_output(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Write the hidden states of accepted tokens to `output.pooler_output`.

        The entry of a request is a tensor `[num_rows, num_layers, hidden_size]`, the 1-D uint8
        envelope of its error, or None if there are no hidden states to return.
        """
        if not self._groups and not self._errors:
            return output
        entries: list[torch.Tensor | None] = [None] * self._num_reqs
        for index, envelope in self._errors.items():
            entries[index] = envelope
        for copy, slices in self._groups:
            states = copy.wait()
            start = 0
            for part in slices:
                end = start + part.end - part.start
                sampled = output.sampled_token_ids[part.index] if output.sampled_token_ids else []
                # With drafts, the number of sampled tokens is the number of accepted drafts plus 1.
                rejected = part.drafts - (len(sampled) - 1) if part.drafts and sampled else 0
                accepted = states[start : end - rejected]
                entries[part.index] = accepted[-1:] if part.mode == "last" else accepted
                start = end
        output.pooler_output = entries
        return output


class HiddenStatesOutput(WrapsAsyncOutput, AsyncModelRunnerOutput):
    """Asynchronous runner output. Hidden states are added as soon as the output is available."""

    def __init__(self, inner: AsyncModelRunnerOutput, taken: CopiedHiddenStates) -> None:
        self._inner = inner
        self._taken = taken

    def get_output(self) -> ModelRunnerOutput:
        return self._taken.attach_to_output(self._inner.get_output())
