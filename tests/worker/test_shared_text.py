# SPDX-License-Identifier: Apache-2.0
"""Text embeddings sent between ranks.

The embeddings are sent in order, in the first step of a chunk. Missing embeddings raise an error.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.worker.diffusion.shared_text import SharedText


class Group:
    """A mock tensor-parallel group, as one rank sees it.

    `first` holds the tensors of rank 0 in broadcast order.
    """

    def __init__(self, size: int, first: list[torch.Tensor] | None = None) -> None:
        self.world_size, self.sent, self._first = size, [], first
        self.sent: list[torch.Tensor]

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 0
        self.sent.append(tensor.clone())
        return tensor if self._first is None else tensor.copy_(self._first[len(self.sent) - 1])


class Model:
    def texts(self, request: Any) -> list[torch.Tensor]:
        texts: list[torch.Tensor] = request.texts
        return texts


def request(*texts: torch.Tensor) -> Any:
    return SimpleNamespace(texts=list(texts))


def shared(group: Group, model: Any = None, *, first_stage: bool = True) -> SharedText:
    return SharedText(model or Model(), group, first_stage=first_stage)  # type: ignore[arg-type]


def embeddings(length: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((length, 4), value, dtype=torch.bfloat16)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_text_embeddings_reach_every_rank_of_every_stage(ranks: int) -> None:
    """Text embeddings reach every rank of every stage, for chunks with one prompt, no prompt or two
    prompts.

    The message lengths are not divisible by the number of ranks, so vLLM does not split the
    messages.
    """
    owner = [
        request(embeddings(3, 1.0)),
        request(),
        request(embeddings(2, 2.0), embeddings(4, 3.0)),
    ]
    first = Group(ranks)
    stage = shared(first)
    stage.complete(owner, {})
    expected = [text for one in owner for text in one.texts]
    assert len(first.sent) == 3

    alongside = [request(embeddings(3)), request(), request(embeddings(2), embeddings(4))]
    shared(Group(ranks, first.sent)).complete(alongside, {})
    after = [request(embeddings(3)), request(), request(embeddings(2), embeddings(4))]
    message = stage.message(owner)
    assert ranks == 1 or all(tensor.numel() % ranks for tensor in message.values())
    later = shared(Group(ranks), first_stage=False)
    later.complete(after, message)
    for filled in (alongside, after):
        got = [text for one in filled for text in one.texts]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert later.message(after).keys() == message.keys()


def test_nothing_is_sent_for_cached_prompts_or_models_without_text() -> None:
    group = Group(2)
    assert shared(group).message([request(), request()]) == {}
    shared(group).complete([request()], {})
    shared(group, first_stage=False).complete([request()], {})
    without = shared(group, object())
    without.complete([request(embeddings(2))], {})
    assert without.message([request(embeddings(2))]) == {} and not group.sent


def test_a_stage_with_the_cached_prompt_skips_its_embeddings() -> None:
    message = shared(Group(1)).message([request(embeddings(2, 5.0)), request(embeddings(3, 6.0))])
    after = [request(), request(embeddings(3))]
    shared(Group(1), first_stage=False).complete(after, message)
    assert torch.equal(after[1].texts[0], embeddings(3, 6.0))


@pytest.mark.parametrize("sent", [[], [embeddings(2)]])
def test_missing_text_embeddings_raise(sent: list[torch.Tensor]) -> None:
    """Missing text embeddings raise an error, so uninitialised memory is never used as
    embeddings.
    """
    message = shared(Group(1)).message([request(*sent)])
    with pytest.raises(RuntimeError, match=f"sent {len(sent)} prompts of a chunk that has 2 here"):
        shared(Group(1), first_stage=False).complete(
            [request(embeddings(2), embeddings(2))], message
        )
