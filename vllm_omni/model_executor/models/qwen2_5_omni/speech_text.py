# SPDX-License-Identifier: Apache-2.0
"""`TalkerPromptBuilder`: builds the talker's prompt from the thinker's results.

The prompt is built as in transformers' `Qwen2_5OmniForConditionalGeneration.generate`. Below,
"state" denotes a token's final hidden state plus its embedding:

    prompt position p
        state of token p, with a zero embedding for audio, image and video placeholders
    after the prompt
        embedding of the voice's first token + codec PAD; state of reply token 0 + codec BOS
    generated code k
        its codec embedding + entry k+1 of: states of the reply, text END, then text PAD repeated

The reply's last token, usually the end-of-turn token, has no state, because it was never an input
to the thinker. Embeddings are read from the checkpoint; this module contains no model.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniTalkerForConditionalGeneration

from vllm_omni.hidden_states import FINAL, HiddenStates
from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import (
    TALKER_EMBEDDINGS,
    THINKER_EMBEDDINGS,
    CheckpointTensors,
    load_voices,
)
from vllm_omni.model_executor.models.qwen2_5_omni.talker_prompt import TalkerPrompt
from vllm_omni.outputs import RequestFailed


@dataclass(frozen=True)
class VisualGrids:
    """Sizes of the images, videos and audio clips in a prompt, which determine the rotary
    positions.
    """

    image_grid_thw: torch.Tensor | None = None
    """Grid size (time, height, width) of each image, int64 [N, 3]."""
    video_grid_thw: torch.Tensor | None = None
    """Grid size (time, height, width) of each video, int64 [N, 3]."""
    second_per_grid: torch.Tensor | None = None
    """Seconds per grid step for each video, fp32 [N]."""
    audio_lengths: torch.Tensor | None = None
    """Length of each audio clip in input frames of the audio encoder, int64 [N]."""

    @property
    def any(self) -> bool:
        return self.image_grid_thw is not None or self.video_grid_thw is not None


def visual_grids(engine_input: Any) -> VisualGrids:
    """Read the grids from the thinker's rendered prompt (`EngineInput`)."""
    if engine_input.get("type") != "multimodal":
        return VisualGrids()
    items = engine_input["mm_kwargs"]

    def read(modality: str, name: str) -> torch.Tensor | None:
        found = [
            item[name].data for item in items.get(modality, ()) if item is not None and name in item
        ]
        return (
            torch.stack([torch.as_tensor(value).reshape(-1) for value in found]) if found else None
        )

    lengths, seconds = read("audio", "audio_feature_lengths"), read("video", "second_per_grid_ts")
    return VisualGrids(
        image_grid_thw=read("image", "image_grid_thw"),
        video_grid_thw=read("video", "video_grid_thw"),
        second_per_grid=None if seconds is None else seconds.reshape(-1).float(),
        audio_lengths=None if lengths is None else lengths.reshape(-1),
    )


class TalkerPromptBuilder:
    """Builds talker prompts, using one checkpoint's token ids, voices and memory-mapped embedding
    tables.
    """

    def __init__(self, path: Path) -> None:
        config: Any = Qwen2_5OmniConfig.from_pretrained(path)
        self.thinker: Any = config.thinker_config
        self.talker: Any = config.talker_config
        self.voices = load_voices(path)
        self._tensors = CheckpointTensors(path)
        talker: Any = self.talker
        self._codec_pad_bos = self._tensors.rows(
            TALKER_EMBEDDINGS, [talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id]
        )
        self._text_end_pad = self._tensors.rows(
            THINKER_EMBEDDINGS, [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
        )

    @property
    def stop_codes(self) -> list[int]:
        """Return the codec tokens that end the speech but are not part of it."""
        return [self.talker.tts_codec_pad_token_id, self.talker.tts_codec_end_token_id]

    def check_voice(self, name: str) -> None:
        """If the checkpoint does not contain voice `name`, raise
        `RequestFailed("invalid_request", ...)` with a list of all voices.
        """
        if name not in self.voices:
            raise RequestFailed(
                "invalid_request", f"voice {name!r} is unknown; known: {', '.join(self.voices)}"
            )

    def build(
        self,
        token_ids: Sequence[int],
        prompt_len: int,
        states: HiddenStates,
        voice: str,
        grids: VisualGrids,
    ) -> TalkerPrompt | None:
        """Return the talker's prompt, or None if the reply consists of only one token.

        Args:
            token_ids: Token ids of the thinker's prompt, followed by its reply.
            prompt_len: Number of tokens in the prompt.
            states: Final hidden states of all tokens except the last one, in order.
            voice: Name of the voice.
            grids: Sizes of images, videos and audio clips.
        """
        rows = len(token_ids) - 1
        if rows <= prompt_len:
            return None
        if states.positions.tolist() != list(range(rows)):
            raise ValueError(f"hidden states of {rows} tokens expected, got {states.num_positions}")
        hidden_LD = states[FINAL]
        both_LD = hidden_LD + self._embeddings(token_ids[:rows], prompt_len).to(hidden_LD.dtype)
        opening = self.voices[voice].bos_token
        opening_1D = self._tensors.rows(THINKER_EMBEDDINGS, [opening]).to(both_LD.dtype)
        prompt_LD = torch.cat(
            [both_LD[:prompt_len], opening_1D, both_LD[prompt_len : prompt_len + 1]]
        )
        prompt_LD[-2:] += self._codec_pad_bos.to(prompt_LD.dtype)
        reply_RD = torch.cat([both_LD[prompt_len + 1 :], self._text_end_pad.to(both_LD.dtype)])
        talker = self.talker
        codec_ids = [talker.tts_codec_mask_token_id] * prompt_len
        text_ids = [*token_ids[:prompt_len], opening, token_ids[prompt_len]]
        return TalkerPrompt(
            token_ids=[*codec_ids, talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id],
            prompt_LD=prompt_LD,
            reply_RD=reply_RD,
            positions_3L=self._positions(text_ids, grids),
        )

    def _embeddings(self, token_ids: Sequence[int], prompt_len: int) -> torch.Tensor:
        embeddings = self._tensors.rows(THINKER_EMBEDDINGS, token_ids)
        thinker = self.thinker
        stand_ins = {
            thinker.audio_token_index,
            thinker.image_token_index,
            thinker.video_token_index,
        }
        replaced = [index for index in range(prompt_len) if token_ids[index] in stand_ins]
        embeddings[replaced] = 0
        return embeddings

    def _positions(self, text_ids: Sequence[int], grids: VisualGrids) -> torch.Tensor:
        """Return the rotary positions [3, L]. Images and videos have 3-D positions, which
        transformers' own function computes.
        """
        if not grids.any:
            return torch.arange(len(text_ids)).expand(3, -1).contiguous()
        ids = torch.tensor([text_ids])
        positions, _ = self._rope_model.get_rope_index(
            ids,
            grids.image_grid_thw,
            grids.video_grid_thw,
            torch.ones_like(ids),
            False,
            grids.audio_lengths,
            grids.second_per_grid,
        )
        return positions[:, 0]

    @functools.cached_property
    def _rope_model(self) -> Any:
        """Return transformers' talker without weights. It is needed because the position function
        is a method of the talker class.
        """
        with torch.device("meta"):
            return Qwen2_5OmniTalkerForConditionalGeneration(self.talker)
