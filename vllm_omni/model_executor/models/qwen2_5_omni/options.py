# SPDX-License-Identifier: Apache-2.0
"""Options of the token2wav engine, of one of its requests, of speech, and of all engines of a server.

Light on purpose: the command line reads it before vLLM is imported.
"""

from typing import Annotated, Any

import msgspec

from vllm_omni.config import parse_options

THINKER_ARCHITECTURE = "VllmOmniQwen2_5OmniThinker"
AR_WORKER_CLS = "vllm_omni.worker.ARGPUWorker"
AR_SCHEDULER_CLS = "vllm_omni.core.sched.ARHiddenStatesScheduler"

THINKER_GPU_SHARE = 0.65
"""`gpu_memory_utilization` of the thinker; the other engines take a quarter of the GPU."""

SAMPLE_RATE = 24_000
"""Hertz; fixed by the vocoder's training, stored nowhere in the checkpoint."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class Token2WavModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max_codes: the most codec tokens one request may bring (codes of context included).

    cuda_graphs: launch a solver interval of a piece of speech as a CUDA graph, if its codes, those of context included,
    are a multiple of 12 and as many have come before.
    """

    max_codes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    cuda_graphs: bool = True


class Token2WavRequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """voice: a name in `spk_dict.pt`. sway_coefficient: bends the solver's time grid, as in the reference.

    first_code: None = the codes are a whole clip, and the noise is the reference's (one draw from a generator with the
    request's seed). A number = they are a piece of a longer clip and this is the index of the first one: noise then
    depends on seed and code index only, so pieces that overlap agree where they overlap.
    left_codes, right_codes: codes at either end that are context only; their sound is not returned.
    """

    voice: str
    sway_coefficient: Annotated[float, msgspec.Meta(ge=-1, le=1)] = -1.0
    first_code: Count | None = None
    left_codes: Count = 0
    right_codes: Count = 0


Codes = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class SpeechDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How speech is made unless a request says otherwise; numbers are those of transformers' `generate`.

    voice: None = the checkpoint's first. chunk_codes, left_codes, right_codes: sound of the first piece and the context
    of each, in codes (50 a second); multiples of 12 keep pieces on the DiT's attention blocks. chunk_codes=0: one clip.
    most_chunk_codes: each piece is twice as long as the one before it, up to this; at most `chunk_codes` = all alike.
    max_codes: longest speech. temperature, top_k, top_p, repetition_penalty: of the talker. num_steps: time points of
    the flow solver. guidance_scale: of the DiT.
    """

    voice: str | None = None
    chunk_codes: Codes = 24
    most_chunk_codes: Codes = 96
    left_codes: Codes = 24
    right_codes: Codes = 12
    max_codes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.9
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 40
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.05
    num_steps: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 10
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.5

    def piece_codes(self, emitted: int) -> int:
        """Codes of the piece behind the first `emitted` ones. Its place alone decides, so that a seed is one sound."""
        first, size = 0, self.chunk_codes
        while first + size <= emitted and size < self.most_chunk_codes:
            first, size = first + size, min(2 * size, self.most_chunk_codes)
        return size

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Codes of whole pieces in the order in which they come, context included; () = one clip."""
        if self.chunk_codes == 0:
            return ()
        sizes: list[int] = []
        emitted = 0
        while not sizes or (sizes[-1] not in sizes[:-1]):
            codes = self.piece_codes(emitted)
            sizes.append(min(self.left_codes, emitted) + codes + self.right_codes)
            emitted += codes
        return tuple(dict.fromkeys(sizes))


class StageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`omni.model` of the server: arguments of the engines beside the thinker, and how speech is made.

    talker, token2wav: keyword arguments of vLLM's `AsyncEngineArgs`, over the defaults here. speech: see
    `SpeechDefaults`.
    """

    talker: dict[str, Any] = msgspec.field(default_factory=dict)
    token2wav: dict[str, Any] = msgspec.field(default_factory=dict)
    speech: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def speech_defaults(self) -> SpeechDefaults:
        """Raises ValueError naming the key."""
        return parse_options(SpeechDefaults, self.speech, "omni.model.speech")
