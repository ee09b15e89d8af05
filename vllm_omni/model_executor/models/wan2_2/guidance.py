# SPDX-License-Identifier: Apache-2.0
"""Splits the two branches of classifier-free guidance over two ranks (`omni.model.cfg_parallel`).

Each rank holds the whole network and runs one branch of every guided request. An all-gather then
collects the predictions of both branches, and each rank combines them. A request without guidance
has only one branch, and both ranks run it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

_BRANCHES = 2


def check_guidance_ranks(ranks: int) -> None:
    """Raise ValueError unless there is one rank for each guidance branch."""
    if ranks != _BRANCHES:
        raise ValueError(
            "omni.model: cfg_parallel runs two branches on two ranks: pass --tensor-parallel-size "
            f"{_BRANCHES}, "
            f"got {ranks}"
        )


@dataclass(frozen=True)
class GuidanceRanks:
    """The guidance branch that this rank runs, and the group of both ranks."""

    branch: int
    """Branch of this rank: 0 for the prompt, 1 for the negative prompt."""
    group: dist.ProcessGroup
    """Process group of the two ranks."""

    @classmethod
    def of_parallel(cls, parallel: ParallelContext) -> "GuidanceRanks":
        """Return the branch of this rank. The two tensor-parallel ranks run one branch each instead
        of sharding layers.

        Raises:
            ValueError: There are not exactly two tensor-parallel ranks.
        """
        check_guidance_ranks(parallel.size)
        assert parallel.group is not None
        return cls(parallel.rank, parallel.group)

    def own(self, branches: int) -> range:
        """Return the request branches that this rank runs."""
        return range(self.branch, self.branch + 1) if branches == _BRANCHES else range(branches)

    def join(self, predictions: torch.Tensor, branches: Sequence[int]) -> torch.Tensor:
        """All-gather the predictions of both ranks, and return the predictions of all branches in
        request order.

        Args:
            predictions: Predictions of this rank, one for each request.
            branches: Number of branches of each request.
        """
        parts = [torch.empty_like(predictions) for _ in range(_BRANCHES)]
        dist.all_gather(parts, predictions.contiguous(), group=self.group)
        return torch.stack(
            [parts[branch][row] for row, count in enumerate(branches) for branch in range(count)]
        )
