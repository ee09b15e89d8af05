# SPDX-License-Identifier: Apache-2.0
"""Arguments, startup and shutdown of the three engines for a Qwen2.5-Omni checkpoint.

Each engine is a stock `AsyncLLM` on the same directory. The thinker can also be the engine of
vLLM's own server, which then owns it. By default, the thinker uses most of a GPU.
`SpeechEngineOptions` can override the arguments of the talker and token2wav.
"""

import asyncio
from pathlib import Path
from typing import Any, Self

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.composition.composed_engine import ComposedEngine
from vllm_omni.engine_arguments.refusals import AR_SCHEDULER_CLS, AR_WORKER_CLS
from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import read_config, stored_dtype
from vllm_omni.model_executor.models.qwen2_5_omni.options import (
    THINKER_GPU_SHARE,
    SpeechEngineOptions,
)
from vllm_omni.model_executor.models.qwen2_5_omni.speech import SpeechComposition
from vllm_omni.model_executor.models.qwen2_5_omni.speech_text import TalkerPromptBuilder
from vllm_omni.model_executor.models.qwen2_5_omni.talker import talker_hf_config


def thinker_args(path: Path, **overrides: Any) -> AsyncEngineArgs:
    """Return the arguments for vLLM's own Qwen2.5-Omni thinker on the AR worker."""
    defaults: dict[str, Any] = {
        "worker_cls": AR_WORKER_CLS,
        "scheduler_cls": AR_SCHEDULER_CLS,
        "dtype": _dtype(path),
    }
    if not current_platform.is_cpu():
        defaults["gpu_memory_utilization"] = THINKER_GPU_SHARE
    return AsyncEngineArgs(model=str(path), **{**defaults, **overrides})


def talker_args(path: Path, **overrides: Any) -> AsyncEngineArgs:
    defaults: dict[str, Any] = {
        "hf_overrides": talker_hf_config,
        "worker_cls": AR_WORKER_CLS,
        "scheduler_cls": AR_SCHEDULER_CLS,
        "dtype": _dtype(path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_model_len": min(
            8192, read_config(path)["talker_config"].get("max_position_embeddings", 8192)
        ),
    }
    if not current_platform.is_cpu():
        defaults["gpu_memory_utilization"] = 0.15
    return AsyncEngineArgs(model=str(path), **{**defaults, **overrides})


def token2wav_args(path: Path, **overrides: Any) -> AsyncEngineArgs:
    defaults: dict[str, Any] = {
        "config_format": "omni",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "additional_config": {"omni": {"max_sessions": 16}},
    }
    if not current_platform.is_cpu():
        defaults["gpu_memory_utilization"] = 0.1
    return AsyncEngineArgs(model=str(path), **{**defaults, **overrides})


def _dtype(path: Path) -> str:
    """Return the stored dtype, because `auto` would convert fp32 weights to half precision."""
    return stored_dtype(read_config(path))


class SpeechEngines:
    """Owns the engines. `composition` serves the requests. Use this class as
    `async with await SpeechEngines.start_engines(path)`.
    """

    def __init__(self, composition: SpeechComposition) -> None:
        self.composition = composition

    @classmethod
    async def start_engines(
        cls,
        path: Path,
        options: SpeechEngineOptions | None = None,
        thinker: AsyncLLM | None = None,
        **thinker_overrides: Any,
    ) -> Self:
        """Start the engines. If `thinker` is given, it is used instead of a new thinker engine. If
        an engine fails to start, the engines that have already started are shut down.
        """
        options = options or SpeechEngineOptions()
        defaults = options.speech_defaults
        builder = await asyncio.to_thread(TalkerPromptBuilder, path)
        wanted = {
            "talker": talker_args(path, **options.talker),
            "token2wav": token2wav_args(path, **options.token2wav),
        }
        if thinker is None:
            wanted = {"thinker": thinker_args(path, **thinker_overrides), **wanted}
        # On CPUs, most of the startup time is spent on imports and loading, so all engines start
        # concurrently. On GPUs, an engine measures its memory use by comparing the GPU's memory
        # before and after loading, so the engines start one after another.
        names = list(wanted)
        turns = [names] if current_platform.is_cpu() else [[name] for name in names]
        engines: list[ComposedEngine] = []
        for turn in turns:
            started = await asyncio.gather(
                *(asyncio.to_thread(AsyncLLM.from_engine_args, wanted[name]) for name in turn),
                return_exceptions=True,
            )
            engines += [
                ComposedEngine(name, it)
                for name, it in zip(turn, started, strict=True)
                if isinstance(it, AsyncLLM)
            ]
            failed = [it for it in started if isinstance(it, BaseException)]
            if failed:
                for engine in engines:
                    engine.shutdown()
                raise failed[0]
        if thinker is not None:
            engines.insert(0, ComposedEngine("thinker", thinker, owned=False))
        return cls(SpeechComposition(*engines, builder=builder, defaults=defaults))

    def shutdown(self) -> None:
        """Shut down every engine that this object started. This method is idempotent."""
        for engine in self.composition.engines:
            engine.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.shutdown()
