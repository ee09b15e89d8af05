# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` that records the text embeddings at the start of each chunk."""

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
"""Environment variable that contains the directory where each rank writes `rank{N}.jsonl`.

The first line is the number of parameters of the rank's text encoder. One line [session, chunk,
digests of the embeddings] follows for each prompt.
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
            if embeddings := driven.texts(request):
                digests = [
                    hashlib.sha256(one.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()
                    for one in embeddings
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
        else:  # A single rank encodes in `prepare_encode`.
            driven.prepare_encode = record_and_prepare
