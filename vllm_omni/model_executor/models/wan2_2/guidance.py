# SPDX-License-Identifier: Apache-2.0
"""`GuidanceRanks`: the two branches of classifier-free guidance on two ranks
(`omni.model.cfg_parallel`).

Each rank holds the whole network and runs one branch of every guided request. An all-gather of the
predictions precedes their combination. A request without guidance has one branch, which both ranks
run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

_BRANCHES = 2


def check_guidance_ranks(ranks: int) -> None:
    """Raise ValueError unless there is one rank per branch."""
    if ranks != _BRANCHES:
        raise ValueError(
            "omni.model: cfg_parallel runs two branches on two ranks: pass --tensor-parallel-size "
            f"{_BRANCHES}, "
            f"got {ranks}"
        )


@dataclass(frozen=True)
class GuidanceRanks:
    """This rank's branch of guided requests."""

    branch: int
    """0: the prompt's, 1: the negative prompt's."""
    group: dist.ProcessGroup
    """Process group of the two ranks."""

    @classmethod
    def of_parallel(cls, parallel: ParallelContext) -> "GuidanceRanks":
        """Use the ranks that would otherwise shard each layer. Raises ValueError unless there are
        two."""
        check_guidance_ranks(parallel.size)
        assert parallel.group is not None
        return cls(parallel.rank, parallel.group)

    def own(self, branches: int) -> range:
        """Return the branches of a request that this rank runs."""
        return range(self.branch, self.branch + 1) if branches == _BRANCHES else range(branches)

    def join(self, predictions: torch.Tensor, branches: Sequence[int]) -> torch.Tensor:
        """All-gather this rank's predictions, one per request, and return those of all branches,
        request by request (collective).
        """
        parts = [torch.empty_like(predictions) for _ in range(_BRANCHES)]
        dist.all_gather(parts, predictions.contiguous(), group=self.group)
        return torch.stack(
            [parts[branch][row] for row, count in enumerate(branches) for branch in range(count)]
        )
