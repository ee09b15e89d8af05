# SPDX-License-Identifier: Apache-2.0
"""The `qwen2_5_omni` family: detection and what the token2wav stage (the one on the diffusion worker) is to vLLM.

With `--config-format omni` a checkpoint directory is its token2wav stage; thinker and talker are started from the
checkpoint's own config (`stages.py`).
"""

from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import is_checkpoint, read_config
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_options import Token2WavModelOptions
from vllm_omni.model_executor.models.registry import ModelFamily


def _hf_config(path: Path) -> dict[str, Any]:
    token2wav = read_config(path)["token2wav_config"]
    dit = token2wav["dit_config"]
    return {
        "architectures": ["Qwen2_5OmniToken2WavPipeline"],
        "dtype": "float32",  # as in the reference: the solver is not run in half precision
        "token2wav_config": token2wav,
        "hidden_size": dit["hidden_size"],
        "num_attention_heads": dit["num_attention_heads"],
        "num_hidden_layers": dit["num_hidden_layers"],
        "vocab_size": dit["num_embeds"],
        "max_position_embeddings": 16,
    }


def _check_options(hf_config: dict[str, Any], omni: OmniConfig) -> None:
    parse_options(Token2WavModelOptions, omni.model, "omni.model")


def _make_tiny(out: Path, seed: int, layout: str) -> None:
    from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_tiny

    make_tiny(out, seed, layout)


FAMILY = ModelFamily(
    name="qwen2_5_omni",
    title="Qwen2.5-Omni: text, pictures and sound in, text and speech out",
    architecture="Qwen2_5OmniToken2WavPipeline",
    detect=is_checkpoint,
    hf_config=_hf_config,
    make_tiny=_make_tiny,
    layouts=("original",),
    check_options=_check_options,
)
