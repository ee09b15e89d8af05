# SPDX-License-Identifier: Apache-2.0
"""The thinker accepts audio of any sample rate without torchaudio."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerProcessingInfo
from vllm.multimodal import audio as vllm_audio
from vllm.multimodal.parse import MultiModalDataParser
from vllm.utils.import_utils import PlaceholderModule

from vllm_omni.model_executor.models.qwen2_5_omni.thinker import (
    ThinkerForConditionalGeneration,
    ThinkerProcessingInfo,
)
from vllm_omni.model_executor.models.registry import AR_ARCHITECTURES, get_family


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_audio_is_resampled_with_pyav(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After resampling with PyAV, a one-second tone is still one second long and has the same
    pitch. Stock vLLM would require torchaudio.
    """
    stock = MultiModalDataParser(target_sr=16000)
    monkeypatch.setattr(Qwen2_5OmniThinkerProcessingInfo, "get_data_parser", lambda self: stock)
    monkeypatch.setattr(vllm_audio, "torchaudio", PlaceholderModule("torchaudio"))
    parser = ThinkerProcessingInfo.__new__(ThinkerProcessingInfo).get_data_parser()
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    (heard,) = parser.parse_mm_data({"audio": (tone, rate)})["audio"].get_all()
    assert len(heard) == 16000
    assert np.abs(np.fft.rfft(heard)).argmax() == 440


def test_the_server_uses_this_thinker(qwen2_5_omni: Path) -> None:
    """The server selects this thinker class through vLLM's `--hf-overrides`. The class differs from
    vLLM's class only in its processing info.
    """
    serve_flags = get_family("qwen2_5_omni").serve_flags
    assert serve_flags is not None
    (architecture,) = json.loads(serve_flags(qwen2_5_omni, True)["hf-overrides"])["architectures"]
    module, _, name = AR_ARCHITECTURES[architecture].partition(":")
    assert getattr(sys.modules[module], name) is ThinkerForConditionalGeneration
    factory = ThinkerForConditionalGeneration._processor_factory
    assert factory.info is ThinkerProcessingInfo
