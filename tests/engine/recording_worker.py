# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` that records the order in which a rank exchanges tensors with other
ranks.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from vllm_omni.model_executor.models.wan.vae import split_decode
from vllm_omni.worker import SharedGPUWorker

FOLDER = "OMNI_TEST_EXCHANGES"
"""Environment variable that contains the directory for the records.

Each rank writes `rank{N}.jsonl` with one line [kind, partners, group] per exchange.
"""


class RecordingWorker(SharedGPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._log = (Path(os.environ[FOLDER]) / f"rank{self.rank}.jsonl").open("w", buffering=1)
        on_host = [get_pp_group().cpu_group, get_tp_group().cpu_group, dist.group.WORLD]

        def recorded(module: ModuleType, name: str, kind: str) -> None:
            original: Callable[..., Any] = getattr(module, name)

            def record(*args: Any, **kwargs: Any) -> Any:
                group = kwargs.get("group")
                if group is not None and group not in on_host:
                    peer = kwargs.get("dst", kwargs.get("src"))
                    partners = dist.get_process_group_ranks(group) if kind == "all" else [peer]
                    self._write(kind, partners, group.group_name)
                return original(*args, **kwargs)

            setattr(module, name, record)

        for name in ("isend", "send"):
            recorded(dist, name, "send")
        for name in ("irecv", "recv"):
            recorded(dist, name, "recv")
        for name in ("all_to_all_single", "all_gather", "all_reduce", "broadcast"):
            recorded(dist, name, "all")
        recorded(split_decode, "_all_gather", "all")  # its name depends on the torch release
        self._record_transfer("isend_tensor_dict", "send", lambda pp: pp.next_rank)
        self._record_transfer("irecv_tensor_dict", "recv", lambda pp: pp.prev_rank)

    def _record_transfer(self, name: str, kind: str, partner: Callable[[Any], int]) -> None:
        """Record the transfer of hidden states, which ranks on the CPUs of one host exchange
        without `torch.distributed`.
        """
        pp = get_pp_group()
        original = getattr(pp, name)

        def record(*args: Any, **kwargs: Any) -> Any:
            self._write(kind, [partner(pp)], "hidden states")
            return original(*args, **kwargs)

        setattr(pp, name, record)

    def _write(self, kind: str, partners: list[int], group: str) -> None:
        self._log.write(json.dumps([kind, partners, group]) + "\n")
