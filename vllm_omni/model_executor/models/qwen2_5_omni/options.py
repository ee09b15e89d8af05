# SPDX-License-Identifier: Apache-2.0
"""Options for the token2wav engine and its requests, for speech, and for a server's engines.

This module imports only modules that are fast to import, because the command line uses it before
importing vLLM.
"""

from typing import Annotated, Any

import msgspec

from vllm_omni.config import parse_options

THINKER_ARCHITECTURE = "VllmOmniQwen2_5OmniThinker"

THINKER_GPU_SHARE = 0.65
"""`gpu_memory_utilization` for the thinker. The talker and token2wav together use another quarter
of the GPU (`engines.py`)."""

SAMPLE_RATE = 24_000
"""Sample rate in Hz that the vocoder was trained at. The checkpoint does not store it.
"""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class Token2WavModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`omni.model` of the token2wav engine."""

    max_codes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    """Maximum number of codec tokens per request, including context. Default: 4096."""
    cuda_graphs: bool = True
    """Whether a solver interval is replayed as a CUDA graph if its number of codes, including
    context, is a multiple of 12 and has occurred before. Default: true.
    """


class Token2WavRequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for one token2wav request."""

    voice: str
    """Name of a voice in `spk_dict.pt`."""
    sway_coefficient: Annotated[float, msgspec.Meta(ge=-1, le=1)] = -1.0
    """Coefficient that warps the solver's time grid, as in the reference. Range: -1 to 1. Default:
    -1."""
    first_code: Count | None = None
    """Index of the first code if the codes are part of a longer clip. The noise then depends only
    on the seed and the code index, so overlapping parts use the same noise. Default: none (the
    codes are a whole clip, and all noise is sampled at once from a generator with the request's
    seed, as in the reference).
    """
    left_codes: Count = 0
    """Number of leading codes that serve only as context. Their audio is not returned. Default: 0.
    """
    right_codes: Count = 0
    """Number of trailing codes that serve only as context. Their audio is not returned. Default: 0.
    """


Codes = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class SpeechDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Defaults for speech generation. The sampling and solver defaults match transformers'
    `generate`.
    """

    voice: str | None = None
    """Name of the voice. Default: the checkpoint's first voice."""
    chunk_codes: Codes = 24
    """Number of codes (50 per second) in the first audio chunk. A multiple of 12 aligns chunks with
    the DiT's attention blocks. 0: the audio is generated as one clip. Default: 24.
    """
    most_chunk_codes: Codes = 96
    """Maximum number of codes in an audio chunk. Each chunk is twice as long as its predecessor, up
    to this length. If the value is at most `chunk_codes`, all chunks have the same length. Default:
    96.
    """
    left_codes: Codes = 24
    """Number of context codes before each audio chunk. Default: 24."""
    right_codes: Codes = 12
    """Number of context codes after each audio chunk. Default: 12."""
    max_codes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    """Maximum number of codes in the speech for one reply. Default: 4096."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.9
    """Sampling temperature for the talker. Range: 0 to 2. Default: 0.9."""
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 40
    """Top-k for the talker. 0: top-k sampling is disabled. Default: 40."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    """Top-p for the talker. Range: above 0, up to 1. Default: 0.8."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.05
    """Repetition penalty for the talker. Range: above 0, up to 2. Default: 1.05."""
    num_steps: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 10
    """Number of time points for the flow solver. Range: 2 to 1000. Default: 10."""
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.5
    """Guidance scale for the DiT. Range: 0 to 100. Default: 0.5."""

    def part_codes(self, emitted: int) -> int:
        """Return the number of codes in the chunk that follows the first `emitted` codes.

        This number depends only on `emitted`, so the same seed always produces the same audio.
        """
        first, size = 0, self.chunk_codes
        while first + size <= emitted and size < self.most_chunk_codes:
            first, size = first + size, min(2 * size, self.most_chunk_codes)
        return size

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Return the distinct sizes of full chunks in codes, including context, in the order in
        which they occur. Return () if the audio is generated as one clip.
        """
        if self.chunk_codes == 0:
            return ()
        sizes: list[int] = []
        emitted = 0
        while not sizes or (sizes[-1] not in sizes[:-1]):
            codes = self.part_codes(emitted)
            sizes.append(min(self.left_codes, emitted) + codes + self.right_codes)
            emitted += codes
        return tuple(dict.fromkeys(sizes))


class SpeechEngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server's `omni.model`: arguments for the engines other than the thinker, and speech
    defaults.
    """

    talker: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments for the talker's `AsyncEngineArgs`, which override this project's
    defaults."""
    token2wav: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments for token2wav's `AsyncEngineArgs`, which override this project's
    defaults."""
    speech: dict[str, Any] = msgspec.field(default_factory=dict)
    """Defaults for speech generation; see `SpeechDefaults`."""

    @property
    def speech_defaults(self) -> SpeechDefaults:
        """Return `speech` as a struct. If a key or value is invalid, the method raises a ValueError
        that names the key.
        """
        return parse_options(SpeechDefaults, self.speech, "omni.model.speech")
