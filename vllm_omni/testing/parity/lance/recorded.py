# SPDX-License-Identifier: Apache-2.0
"""Loads the recorded tiny Lance model and compares results in each precision.

In fp32, the tolerance is 2e-5 per stage and 1e-4 for final latents. Ids, masks, positions and
greedy tokens must be equal. In bf16, the relative L2 distance from the recorded bf16 result may be
at most 2 %, or at most twice the distance between the recorded bf16 and fp32 results, whichever is
larger. The second limit exists because the result and the recording are rounded independently.
Greedy tokens in bf16 are compared up to the first step whose two best logits differ by less than
2 % of the largest logit.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.lance.config import LanceConfig, VisionConfig
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.network.vision import VisionTower
from vllm_omni.model_executor.models.lance.tasks.context import ContextSegment, VisualContents
from vllm_omni.model_executor.models.lance.tasks.prompt import (
    VISION_END,
    VISION_START,
    PromptTokens,
)
from vllm_omni.model_executor.models.lance.tasks.sampling import TokenChoice
from vllm_omni.model_executor.models.lance.tasks.stepper import BatchStepper
from vllm_omni.model_executor.models.lance.tasks.understanding import TextRules, UnderstandingChunk
from vllm_omni.testing.parity.comparison import (
    GoldenScenario,
    check_recorded,
    fill_slots,
    read_tensors,
)

_LATENT_SETTINGS = {
    "latent_patch_size": [1, 1, 1],
    "z_channels": 48,
    "max_num_frames": None,
    "max_latent_size": None,
}
"""Supported value of each latent setting, or None if any value is supported."""
_OTHER_LLM_KEYS = (
    *("max_position_embeddings", "tie_word_embeddings", "_attn_implementation", "image_token_id"),
    *("layer_module", "qk_norm", "qk_norm_und", "qk_norm_gen", "apply_qwen_2_5_vl_pos_emb"),
)
"""Keys of the recorded language model's configuration that do not affect the comparison or are
fixed in Lance.
"""
STAGE, LATENT, TABLE, VAE = 2e-5, 1e-4, 1e-6, 2e-5
_BF16 = 2e-2
WEIGHTS = "state_dict.safetensors"


class ToyModel:
    """The recorded tiny model and its vocabulary.

    Args:
        directory: Directory with the recordings.
        precision: Precision of the recording to read, `fp32` or `bf16`.
        dtype: Dtype to build the model in.
    """

    def __init__(self, directory: Path, precision: str, dtype: torch.dtype) -> None:
        meta = json.loads((directory / f"meta_{precision}.json").read_text())
        values = meta["config"]
        check_recorded(
            "config.llm", values["llm"], (*LanceConfig.checkpoint_keys(), *_OTHER_LLM_KEYS)
        )
        vision_keys = (*VisionConfig.__dataclass_fields__, "in_chans", "hidden_act")
        check_recorded("config.vit", values["vit"], vision_keys)
        latent = check_recorded("config.latent", values["latent"], _LATENT_SETTINGS)
        for key, allowed in _LATENT_SETTINGS.items():
            if allowed not in (None, latent.get(key, allowed)):
                raise ValueError(
                    f"config.latent has {key} = {latent[key]!r}; Lance has {allowed!r}"
                )
        self.packing: dict[str, Any] = meta.get("packing", {})
        self.special: dict[str, int] = values["specials"]
        self.vocabulary: dict[str, int] = {**meta["toy_vocab"], **self.special}
        self.config = LanceConfig.from_checkpoint(
            values["llm"],
            values["vit"],
            max_latent_size=latent["max_latent_size"],
            max_latent_frames=1 + (latent["max_num_frames"] - 1) // 4,
        )
        with default_dtype(dtype):
            self.network = LanceNetwork(self.config)
            self.vision = VisionTower(self.config.vision)
        weights, _ = read_tensors(directory / WEIGHTS)
        self.table = weights.pop("latent_pos_embed.pos_embed")
        slots = checkpoint_slots(self.network) | {
            f"vit_model.{name}": slot for name, slot in checkpoint_slots(self.vision.tower).items()
        }
        fill_slots(slots, weights, WEIGHTS)
        markers = (self.special[VISION_START], self.special[VISION_END])
        self.stepper = BatchStepper(self.network, markers, self.config.vocab_size)

    @cached_property
    def words(self) -> dict[int, str]:
        return {number: word for word, number in self.vocabulary.items()}

    def encode(self, text: str) -> list[int]:
        """Tokenise text with the recorded vocabulary. The longest match is always taken."""
        ids = []
        while text:
            word = max(
                (word for word in self.vocabulary if text.startswith(word)), key=len, default=None
            )
            if word is None:
                raise ValueError(f"the recorded vocabulary has no word for {text[:20]!r}")
            ids.append(self.vocabulary[word])
            text = text[len(word) :]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.words[number] for number in ids)

    @property
    def tokens(self) -> PromptTokens:
        return PromptTokens(self.encode, self.encode)


class Fp32Judge:
    """Compares a stage with its fp32 recording, if the stage was recorded."""

    def __init__(self, scenario: GoldenScenario) -> None:
        self.scenario = scenario

    def __call__(
        self, stage: str, ours: torch.Tensor, name: str, tolerance: float, rows: slice = slice(None)
    ) -> None:
        if name not in self.scenario:
            return
        self.scenario.compare(stage, ours, self.scenario.get(name)[rows], tolerance)


class Bf16Judge:
    """Compares a stage by relative L2 distance, and tokens only up to the first one that bf16
    rounding can change.
    """

    def __init__(self, scenario: GoldenScenario, fp32: GoldenScenario) -> None:
        self.scenario, self.fp32 = scenario, fp32

    def __call__(
        self, stage: str, ours: torch.Tensor, name: str, tolerance: float, rows: slice = slice(None)
    ) -> None:
        if name not in self.scenario:
            return
        recorded, exact = self.scenario.get(name)[rows], self.fp32.get(name)[rows]
        if not recorded.is_floating_point():
            if size := self._decided(name.replace("tokens", "logits")):
                self.scenario.compare(f"{stage} (decided)", ours[:size], recorded[:size], 0.0)
            return
        size = min(len(recorded), self._decided(name) + 1 if "x2t" in name else len(recorded))
        allowed = max(_BF16, 2.0 * _distance(recorded[:size], exact[:size]))
        distance = torch.tensor(_distance(ours[:size], recorded[:size]))
        self.scenario.compare(f"{stage} (relative L2)", distance, torch.tensor(0.0), allowed)

    def _decided(self, logits: str) -> int:
        """Return the number of initial tokens that bf16 rounding cannot change."""
        chosen_by = self.fp32.get(logits)
        # These logits were recorded after each token, so the prompt's last logits determine the
        # first token.
        if logits == "a.greedy_logits":
            chosen_by = torch.cat((self.fp32.get("a.logits")[-1:], chosen_by[:-1]))
        best = chosen_by.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > _BF16 * best[:, 0].abs()
        return int(clear.int().cumprod(0).sum())


Judge = Fp32Judge | Bf16Judge


def _distance(ours: torch.Tensor, recorded: torch.Tensor) -> float:
    return float((ours.double() - recorded.double()).norm() / recorded.double().norm())


def greedy(
    model: ToyModel,
    context: Sequence[ContextSegment],
    visuals: VisualContents,
    steps: int,
    end_token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode greedily, and return the tokens and the logits that each token was chosen from."""
    capacity = sum(placed.segment.length for placed in context) + steps
    reading = UnderstandingChunk(
        cache=model.network.language_model.new_cache(capacity),
        rules=TextRules(TokenChoice(0.0, 1.0), seed=0, max_tokens=steps, end_token=end_token),
        chunk_tokens=steps,
        context=context,
        visuals=visuals,
    )
    logits = []
    while not reading.done:
        model.stepper.step([], [reading])
        reading.settle(lambda ids: "")
        assert reading.logits is not None
        logits.append(reading.logits)
    return torch.tensor(reading.progress.tokens), torch.stack(logits)
