# SPDX-License-Identifier: Apache-2.0
"""Step caching in a pipeline of diffusers, by its own first-block cache: for one call, in the transformers that it has.

A forward computes the first block; where its result has changed little since the last whole forward (diffusers'
`FirstBlockCacheConfig`), the other blocks' share of that one is added again. So a step whose forwards are cached still
costs a block of each. Held by tests/executor/test_transformer_cache.py.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from vllm_omni.outputs import RequestFailed

_DENOISERS = ("transformer", "transformer_2")


@contextmanager
def cached_steps(pipeline: Any, threshold: float | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Cache within the block. threshold: of the change that is bridged; None = nothing is cached.

    Yields a function that returns a result's entry: the threshold, and the share of forwards that were computed whole.
    Raises `RequestFailed("invalid_request", ...)` for a pipeline that diffusers can not cache.
    """
    if threshold is None:
        yield dict
        return
    from diffusers import FirstBlockCacheConfig

    denoisers = [found for name in _DENOISERS if (found := pipeline.components.get(name)) is not None]
    counts: list[_Forwards] = []
    with ExitStack() as after:
        for denoiser in denoisers:
            try:
                denoiser.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            except (AttributeError, ValueError) as error:
                raise _refused(pipeline) from error
            after.callback(denoiser.disable_cache)
            counts.append(_Forwards(denoiser, after))
        if not counts:
            raise _refused(pipeline)

        def entry() -> dict[str, Any]:
            begun, whole = (sum(getattr(count, name) for count in counts) for name in ("begun", "whole"))
            return {"first_block_cache": {"threshold": threshold, "computed_share": round(whole / max(1, begun), 4)}}

        yield entry


class _Forwards:
    """Counts a transformer's forwards, and those that reach the last block's first layer."""

    def __init__(self, denoiser: nn.Module, after: ExitStack) -> None:
        self.begun = self.whole = 0
        lists = [part for part in denoiser.children() if isinstance(part, nn.ModuleList)]
        last_block = max(lists, key=len)[-1]
        inner = [layer for layer in last_block.modules() if not list(layer.children()) and list(layer.parameters())]
        for layer, name in ((denoiser, "begun"), (inner[0], "whole")):
            handle = layer.register_forward_pre_hook(lambda *_, name=name: self._count(name))
            after.callback(handle.remove)

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)


def _refused(pipeline: Any) -> RequestFailed:
    return RequestFailed(
        "invalid_request",
        f"first_block_cache: diffusers has no first-block cache for {type(pipeline).__name__}; leave it out",
    )
