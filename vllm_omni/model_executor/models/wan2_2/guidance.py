# SPDX-License-Identifier: Apache-2.0
"""`GuidanceRanks`: the two branches of classifier-free guidance on two ranks (`omni.model.cfg_parallel`).

Each rank holds the whole network and runs one branch of every guided request; before the branches are combined the
ranks exchange their predictions. A request without guidance has one branch, which both run.
Held by tests/model_executor/models/wan2_2/test_wan22_guidance.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_omni.model_executor.layers.parallel import ParallelContext

_BRANCHES = 2


def check_guidance_ranks(ranks: int) -> None:
    """Raise ValueError unless there is a rank for each branch."""
    if ranks != _BRANCHES:
        raise ValueError(
            f"omni.model: cfg_parallel runs two branches on two ranks: pass --tensor-parallel-size {_BRANCHES}, "
            f"got {ranks}"
        )


@dataclass(frozen=True)
class GuidanceRanks:
    """branch: this rank's, 0 = the prompt's, 1 = the negative prompt's."""

    branch: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, parallel: ParallelContext) -> "GuidanceRanks":
        """Take the ranks that would otherwise share each layer. Raises ValueError unless there are two."""
        check_guidance_ranks(parallel.size)
        assert parallel.group is not None
        return cls(parallel.rank, parallel.group)

    def own(self, branches: int) -> range:
        """The branches of a request that this rank runs."""
        return range(self.branch, self.branch + 1) if branches == _BRANCHES else range(branches)

    def join(self, predictions: torch.Tensor, branches: Sequence[int]) -> torch.Tensor:
        """This rank's rows, one for each request -> the rows of all branches, request by request (collective)."""
        parts = [torch.empty_like(predictions) for _ in range(_BRANCHES)]
        dist.all_gather(parts, predictions.contiguous(), group=self.group)
        return torch.stack([parts[branch][row] for row, count in enumerate(branches) for branch in range(count)])
