# SPDX-License-Identifier: Apache-2.0
"""Describes the `qwen2_5_omni` family for the command line and the config parser.

With `--config-format omni`, a checkpoint directory stands for its token2wav model, which the
diffusion worker runs. The thinker and the talker use the checkpoint's own config (`engines.py`).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.engine_arguments.refusals import AR_SCHEDULER_CLS, AR_WORKER_CLS
from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import (
    is_checkpoint,
    read_config,
    stored_dtype,
)
from vllm_omni.model_executor.models.qwen2_5_omni.options import (
    THINKER_ARCHITECTURE,
    THINKER_GPU_SHARE,
    SpeechEngineOptions,
    Token2WavModelOptions,
)
from vllm_omni.model_executor.models.registry import ModelFamily

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_omni.composition.speech import SpeechModel


def _hf_config(path: Path) -> dict[str, Any]:
    token2wav = read_config(path)["token2wav_config"]
    dit = token2wav["dit_config"]
    return {
        "architectures": ["Qwen2_5OmniToken2WavPipeline"],
        "dtype": "float32",  # as in the reference, because the solver needs full precision
        "token2wav_config": token2wav,
        "hidden_size": dit["hidden_size"],
        "num_attention_heads": dit["num_attention_heads"],
        "num_hidden_layers": dit["num_hidden_layers"],
        "vocab_size": dit["num_embeds"],
        "max_position_embeddings": 16,
    }


def _check_options(hf_config: dict[str, Any], omni: OmniConfig) -> None:
    """Check `omni.model`. A server's `omni.model` contains the options for all three engines. The
    token2wav engine's `omni.model` contains only that engine's options.
    """
    if set(omni.model) <= {field.name for field in msgspec.structs.fields(Token2WavModelOptions)}:
        parse_options(Token2WavModelOptions, omni.model, "omni.model")
    else:
        assert parse_options(SpeechEngineOptions, omni.model, "omni.model").speech_defaults


def _serve_flags(path: Path, on_cpu: bool) -> dict[str, str]:
    flags = {
        "worker-cls": AR_WORKER_CLS,
        "scheduler-cls": AR_SCHEDULER_CLS,
        "dtype": stored_dtype(read_config(path)),
        "hf-overrides": json.dumps({"architectures": [THINKER_ARCHITECTURE]}),
    }
    return flags if on_cpu else {**flags, "gpu-memory-utilization": str(THINKER_GPU_SHARE)}


async def _start_speech(path: Path, omni: OmniConfig, thinker: "AsyncLLM") -> "SpeechModel":
    # Imported here, because the `engines` module imports vLLM's engine.
    from vllm_omni.model_executor.models.qwen2_5_omni.engines import SpeechEngines

    options = parse_options(SpeechEngineOptions, omni.model, "omni.model")
    return (await SpeechEngines.start_engines(path, options, thinker=thinker)).composition


FAMILY = ModelFamily(
    name="qwen2_5_omni",
    title="Qwen2.5-Omni: text and speech from text, images and sound",
    architecture="Qwen2_5OmniToken2WavPipeline",
    detect=is_checkpoint,
    hf_config=_hf_config,
    layouts=("original",),
    check_options=_check_options,
    # The server's engine is the thinker. The endpoint plugin starts the other two engines.
    serve_flags=_serve_flags,
    endpoint_plugins=("vllm_omni_speech",),
    start_speech=_start_speech,
)
