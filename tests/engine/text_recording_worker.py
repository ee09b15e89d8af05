# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` that writes down which prompts' rows its chunks begin with."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_world_group

from vllm_omni.model_executor.models.wan.text_encoder.encoder import TextEncoder
from vllm_omni.worker import SharedGPUWorker

FOLDER = "OMNI_TEST_TEXTS"
"""Environment variable: where each rank writes `rank{N}.jsonl`.

A line with the number of its text encoder's parameters, then [session, chunk, digests of its rows]
of each prompt.
"""


class TextRecordingWorker(SharedGPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        log = (Path(os.environ[FOLDER]) / f"rank{self.rank}.jsonl").open("w", buffering=1)
        model: Any = self.model_runner.network
        encoders = [module for module in model.modules() if isinstance(module, TextEncoder)]
        log.write(
            json.dumps(sum(p.numel() for encoder in encoders for p in encoder.parameters())) + "\n"
        )
        driven: Any = self.model_runner.role.model

        def record(request: Any) -> None:
            if rows := driven.texts(request):
                digests = [
                    hashlib.sha256(one.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()
                    for one in rows
                ]
                log.write(
                    json.dumps([request.session.session_id, request.session.chunk_index, digests])
                    + "\n"
                )

        texts = self.model_runner.parts.texts
        complete, prepare = texts.complete, driven.prepare_encode

        def complete_and_record(
            first_part: Sequence[Any], received: Mapping[str, torch.Tensor]
        ) -> None:
            complete(first_part, received)
            for request in first_part:
                record(request)

        def record_and_prepare(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            request = args[0] if args else kwargs["request"]
            if request.session is not None:
                record(request)
            return result

        if get_world_group().world_size > 1:
            object.__setattr__(texts, "complete", complete_and_record)
        else:  # a rank on its own encodes in `prepare_encode`
            driven.prepare_encode = record_and_prepare
