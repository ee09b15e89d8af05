# SPDX-License-Identifier: Apache-2.0
"""Helpers that drive a streaming model in this process as the runner does: by steps, chunks and
pipeline stages.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

Result = tuple[dict[str, Any], dict[str, torch.Tensor]]
Bits = tuple[dict[str, torch.Tensor], dict[str, Any]]


def step(model: Any, batch: Sequence[Any]) -> None:
    """Run one denoise step for a batch of requests. The requests may be at different steps."""
    model.step_scheduler(batch, model.denoise_step(batch))
    for request in batch:
        request.step += 1


def finish(model: Any, request: Any) -> Result:
    """Decode and commit a request after its last step."""
    result: Result = model.post_decode(request)
    model.commit(request)
    return result


def run_steps(model: Any, request: Any) -> None:
    """Prepare a request and run all of its denoise steps in a batch of its own."""
    model.prepare_encode(request)
    while request.step < request.num_steps:
        step(model, [request])


def run_request(model: Any, request: Any) -> Result:
    """Run a chunk's whole request in a batch of its own: prepare, denoise, decode and commit."""
    run_steps(model, request)
    return finish(model, request)


def step_stages(stages: Sequence[Any], batches: Sequence[Sequence[Any]]) -> None:
    """Run `step` through pipeline stages. Each stage has its own batch, which contains its own
    copies of the requests.
    """
    hidden = None
    for model, batch in zip(stages, batches, strict=True):
        hidden = model.denoise_step(batch, hidden)
    assert hidden is not None
    stages[-1].step_scheduler(batches[-1], hidden)
    for batch in batches:
        for request, last in zip(batch, batches[-1], strict=True):
            stages[0].set_latents(request, stages[-1].latents(last))
            request.step += 1


def run_stages(stages: Sequence[Any], requests: Sequence[Any]) -> Result:
    """Run one chunk through pipeline stages. Each stage has its own copy of the request."""
    for model, request in zip(stages, requests, strict=True):
        model.prepare_encode(request)
    while requests[0].step < requests[0].num_steps:
        step_stages(stages, [[request] for request in requests])
    result: Result = stages[-1].post_decode(requests[-1])
    for model, request in zip(stages, requests, strict=True):
        model.commit(request)
    return result


def run_staggered(
    model: Any,
    open_session: Callable[[str], Any],
    make_request: Callable[[Any, int], Any],
    chunks: int = 3,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Run three sessions, first one at a time and then in shared batches.

    In the shared run, each session starts one step after the preceding session. As in the runner,
    requests with the same `batch_key` share a batch.

    Args:
        model: Model that runs the sessions.
        open_session: Opens a session with the given id.
        make_request: Returns a session's next request, for latents with the given seed.
        chunks: Number of chunks per session.

    Returns:
        The latents of each chunk from the shared run and from the session's own run, and the number
        of batches with requests at different steps.
    """
    alone: dict[str, list[torch.Tensor]] = {}
    for seed, name in enumerate("abc"):
        session = open_session(name)
        alone[name] = [
            run_request(model, make_request(session, seed))[1]["latents"].clone()
            for _ in range(chunks)
        ]
    done: dict[str, list[torch.Tensor]] = {name: [] for name in alone}
    sessions = {name: open_session(name) for name in alone}
    live: list[Any] = []
    waiting, mixed = list(alone), 0
    while any(len(latents) < chunks for latents in done.values()):
        if waiting:
            name = waiting.pop(0)
            live.append(make_request(sessions[name], "abc".index(name)))
            model.prepare_encode(live[-1])
        batches: dict[Hashable, list[Any]] = {}
        for request in live:
            batches.setdefault(model.batch_key(request), []).append(request)
        for batch in batches.values():
            mixed += len({request.step for request in batch}) > 1
            step(model, batch)
        for request in [request for request in live if request.step == request.num_steps]:
            name = request.session.session_id
            done[name].append(finish(model, request)[1]["latents"])
            live.remove(request)
            if len(done[name]) < chunks:
                waiting.append(name)
    return [pair for name in alone for pair in zip(done[name], alone[name], strict=True)], mixed


def session_bits(session: Any) -> Bits:
    """Return copies of all of a session's tensors and scalars."""
    return {name: tensor.clone() for name, tensor in session.tensors().items()}, session.scalars()


def assert_same(session: Any, before: Bits) -> None:
    """Assert that a session still equals `before`, the result of an earlier `session_bits` call."""
    tensors, scalars = session.tensors(), session.scalars()
    assert scalars == before[1] and tensors.keys() == before[0].keys()
    assert [name for name in tensors if not torch.equal(tensors[name], before[0][name])] == []


def run_vae_stage(layers: Any, vae: Any, ours: Any, theirs: Any) -> Result:
    """Run one chunk on a rank that has transformer layers, and decode it on a VAE stage.

    Args:
        layers: The model on the rank that has transformer layers.
        vae: The model on the VAE stage.
        ours: The chunk's request on the rank that has transformer layers.
        theirs: The chunk's request on the VAE stage.
    """
    layers.prepare_encode(ours)
    vae.prepare_encode(theirs)
    assert vae.latents(theirs).numel() == layers.latents(ours).numel()
    while ours.step < ours.num_steps - ours.clean_passes:
        step(layers, [ours])
    vae.unpack_decode_state(theirs, layers.latents(ours).clone(), layers.pack_decode_state(ours))
    result: Result = vae.post_decode(theirs)
    while ours.step < ours.num_steps:
        step(layers, [ours])
    layers.commit(ours)
    vae.commit(theirs)
    return result


def run_adapted(
    model: Any, store: Any, choices: Sequence[Any], make_request: Callable[[], Any]
) -> list[torch.Tensor]:
    """Return the latents of successive chunks of a session that uses adapters.

    Args:
        model: Model that runs the session.
        store: The model's adapter store.
        choices: Adapters for each chunk.
        make_request: Returns the next chunk's request.
    """
    latents: list[torch.Tensor] = []
    before = None
    for wanted in choices:
        selection, request = store.select(wanted), make_request()
        request.adapters, request.same_adapters = selection, selection == before
        before = selection
        with store.applied(selection):
            latents.append(run_request(model, request)[1]["latents"].clone())
    return latents
