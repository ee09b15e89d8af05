# SPDX-License-Identifier: Apache-2.0
"""vLLM's own thinker, with audio resampled by PyAV instead of torchaudio.

By default, vLLM resamples with torchaudio, which is not a dependency of vLLM's CPU builds. Without
torchaudio, requests that contain audio at a sample rate other than the model's 16 kHz would fail
with HTTP status 500. The resampling method is an argument of the data parser, which each model's
processing info creates, so the public way to choose the method is to subclass both classes.
`serve_flags` selects this architecture.
"""

from typing import Final

from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.audio import AudioResampler
from vllm.multimodal.parse import MultiModalDataParser

RESAMPLE_METHOD: Final = "pyav"


class ThinkerProcessingInfo(Qwen2_5OmniThinkerProcessingInfo):
    def get_data_parser(self) -> MultiModalDataParser:
        parser: MultiModalDataParser = super().get_data_parser()
        parser.audio_resampler = AudioResampler(
            parser.audio_resampler.target_sr, method=RESAMPLE_METHOD
        )
        return parser


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5OmniThinkerMultiModalProcessor,
    info=ThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class ThinkerForConditionalGeneration(Qwen2_5OmniThinkerForConditionalGeneration):
    pass
