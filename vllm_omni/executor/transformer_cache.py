# SPDX-License-Identifier: Apache-2.0
"""Step caching with diffusers' first-block cache, for one pipeline call.

Every forward pass computes the first block. If the first block's result has changed little since
the last full forward pass (diffusers' `FirstBlockCacheConfig`), the other blocks' contribution in
that pass is reused. A cached forward pass is therefore not free: it costs as much as the first
block.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from vllm_omni.outputs import RequestFailed

_DENOISERS = ("transformer", "transformer_2")


@contextmanager
def cached_steps(pipeline: Any, threshold: float | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Context manager within which a pipeline's transformers use the first-block cache.

    Args:
        pipeline: The pipeline whose transformers use the cache.
        threshold: Relative change in the first block's result below which the cache is used. None:
            the cache is disabled.

    Yields:
        A function that returns metadata for the result: the threshold, and the fraction of forward
            passes computed in full.

    Raises:
        RequestFailed: diffusers does not support the cache for this pipeline (code
            `invalid_request`).
    """
    if threshold is None:
        yield dict
        return
    from diffusers import FirstBlockCacheConfig

    denoisers = [
        found for name in _DENOISERS if (found := pipeline.components.get(name)) is not None
    ]
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
            begun, whole = (
                sum(getattr(count, name) for count in counts) for name in ("begun", "whole")
            )
            return {
                "first_block_cache": {
                    "threshold": threshold,
                    "computed_share": round(whole / max(1, begun), 4),
                }
            }

        yield entry


class _Forwards:
    """Counts a transformer's forward passes, and how many of them run the last block."""

    def __init__(self, denoiser: nn.Module, after: ExitStack) -> None:
        self.begun = self.whole = 0
        lists = [part for part in denoiser.children() if isinstance(part, nn.ModuleList)]
        last_block = max(lists, key=len)[-1]
        inner = [
            layer
            for layer in last_block.modules()
            if not list(layer.children()) and list(layer.parameters())
        ]
        for layer, name in ((denoiser, "begun"), (inner[0], "whole")):
            handle = layer.register_forward_pre_hook(lambda *_, name=name: self._count(name))
            after.callback(handle.remove)

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)


def _refused(pipeline: Any) -> RequestFailed:
    return RequestFailed(
        "invalid_request",
        f"first_block_cache: diffusers has no first-block cache for {type(pipeline).__name__}; "
        "leave it out",
    )
