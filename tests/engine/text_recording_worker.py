# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` that writes down which prompts' rows its chunks begin with."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.models.wan.text_encoder import TextEncoder
from vllm_omni.worker import SharedGPUWorker

FOLDER = "OMNI_TEST_TEXTS"
"""Environment variable: where each rank writes `rank{N}.jsonl`.

A line with the number of its text encoder's parameters, then [session, chunk, digests of its rows] of each prompt.
"""


class TextRecordingWorker(SharedGPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        log = (Path(os.environ[FOLDER]) / f"rank{self.rank}.jsonl").open("w", buffering=1)
        model: Any = self.model_runner.network
        encoders = [module for module in model.modules() if isinstance(module, TextEncoder)]
        log.write(json.dumps(sum(p.numel() for encoder in encoders for p in encoder.parameters())) + "\n")
        texts = self.model_runner.parts.texts
        complete = texts.complete

        def record(beginning: Sequence[Any], received: Mapping[str, torch.Tensor]) -> None:
            complete(beginning, received)
            for request in beginning:
                if rows := model.texts(request):
                    digests = [
                        hashlib.sha256(one.contiguous().view(torch.uint8).cpu().numpy()).hexdigest() for one in rows
                    ]
                    log.write(json.dumps([request.session.session_id, request.session.chunk_index, digests]) + "\n")

        object.__setattr__(texts, "complete", record)
