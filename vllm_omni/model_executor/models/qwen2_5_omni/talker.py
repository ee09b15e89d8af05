# SPDX-License-Identifier: Apache-2.0
"""The talker as a vLLM model. It generates codec tokens from the thinker's hidden states: at each
step, one of the vectors derived from them (`TalkerPrompt.reply_RD`) is added to the codec
embedding.

The model consists of vLLM's own modules: `Qwen2Model`, `LogitsProcessor` and M-RoPE. The attention
layers take an explicit head size, because the talker's width is not heads x head size. To add the
hidden states, the model must find the ones that belong to each token's request.

**Slots.** vLLM passes no request id to `forward`. The M-RoPE positions are the only argument of
`forward` that the model controls: it computes them for each request (`get_mrope_input_positions`),
and vLLM increments them from there. For this reason, the position of sequence index n, for the
request in slot s, is encoded as `s << SLOT_SHIFT | n` in all three dimensions. `forward` decodes
this position and looks up embeddings, reply states and the real rotary positions in fixed-size
buffers. This scheme works with both of vLLM's model runners (V1 and V2), and with chunked prefill,
preemption, async scheduling and CUDA graphs. It needs no hook in the runner.

Prefix caching must be disabled, because the prompt ids of all requests are the same. Codec BOS is
never sampled, as in the reference.

T tokens in a batch, S slots, L prompt tokens, R reply states, D embedding size, H hidden size.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsPP
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.models.qwen2_5_omni.talker_prompt import MODALITY, read_item

ARCHITECTURE = "Qwen2_5OmniTalkerForConditionalGeneration"
SLOT_SHIFT = 20
MAX_SLOTS = 1 << (31 - SLOT_SHIFT)
"""Maximum number of slots. Slots and indices must fit into 32 bits, because Model Runner V2 stores
positions as int32."""


def talker_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the talker's config, given the whole checkpoint's config. The talker's engine uses
    this function as `hf_overrides`.
    """
    # vLLM also applies the overrides to the sub-config that they return.
    talker = getattr(config, "talker_config", config)
    talker.architectures = [ARCHITECTURE]
    return talker


class _TalkerLayer(Qwen2DecoderLayer):
    """`Qwen2DecoderLayer` with an explicit head size. The q, k and v projections have biases, and
    the o projection does not.
    """

    def __init__(
        self, config: Any, cache_config: Any = None, quant_config: Any = None, prefix: str = ""
    ) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn: Any = LlamaAttention(
            config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            bias=True,
            bias_o_proj=False,
            cache_config=cache_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class TalkerForConditionalGeneration(nn.Module, SupportsPP, SupportsMRoPE):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"talker.": "", "thinker.": None, "token2wav.": None}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError(
                "the talker's prompts differ in their embeddings only: pass "
                "enable_prefix_caching=False"
            )
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.model = Qwen2Model(
            vllm_config=vllm_config,
            prefix=maybe_prefix(prefix, "model"),
            decoder_layer_type=_TalkerLayer,
        )
        if get_pp_group().is_first_rank:
            self.model.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.embedding_size
            )
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size)
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

        slots = vllm_config.scheduler_config.max_num_seqs + 1
        length = vllm_config.model_config.max_model_len
        if slots > MAX_SLOTS or length > 1 << SLOT_SHIFT:
            raise ValueError(
                f"the talker takes at most {MAX_SLOTS - 1} sequences of {1 << SLOT_SHIFT} tokens"
            )
        for name, shape, dtype in (
            ("prompt_SLH", (slots, length, config.hidden_size), None),
            ("reply_SRD", (slots, length, config.embedding_size), None),
            ("rope_3SL", (3, slots, length), torch.int64),
            ("prompt_len_S", (slots,), torch.int64),
            ("reply_len_S", (slots,), torch.int64),
            ("rope_delta_S", (slots,), torch.int64),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)
        self.prompt_SLH: torch.Tensor
        self.reply_SRD: torch.Tensor
        self.rope_3SL: torch.Tensor
        self.prompt_len_S: torch.Tensor
        self.reply_len_S: torch.Tensor
        self.rope_delta_S: torch.Tensor

    # -- per request -------------------------------------------------------------------------------

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Copy a request's tensors into its slot, and return the request's encoded positions and
        their offset. vLLM calls this method for each request.

        After preemption, `input_tokens` may include tokens that were already generated.
        """
        slot = 0
        for feature in mm_features:
            if feature.modality == MODALITY and feature.data is not None:
                slot = self._take(feature.data)
        index = torch.arange(len(input_tokens)) + (slot << SLOT_SHIFT)
        return index.expand(3, -1).contiguous(), slot << SLOT_SHIFT

    @torch.inference_mode()
    def _take(self, data: Any) -> int:
        prompt_LD, reply_RD, positions_3L, slot = read_item(data)
        if not 0 < slot < len(self.prompt_len_S):
            raise ValueError(
                f"talker slot {slot} is not between 1 and {len(self.prompt_len_S) - 1}"
            )
        length, rows = len(prompt_LD), len(reply_RD)
        if length > self.prompt_SLH.shape[1] or rows > self.reply_SRD.shape[1]:
            raise ValueError(
                f"talker prompt of {length} tokens and {rows} reply rows exceeds "
                f"{self.prompt_SLH.shape[1]}"
            )
        weight = self.thinker_to_talker_proj.weight
        self.prompt_SLH[slot, :length] = self.thinker_to_talker_proj(prompt_LD.to(weight))
        self.reply_SRD[slot, :rows] = reply_RD.to(weight)
        self.rope_3SL[:, slot, :length] = positions_3L.to(self.rope_3SL.device)
        self.prompt_len_S[slot] = length
        self.reply_len_S[slot] = rows
        self.rope_delta_S[slot] = int(positions_3L.max()) + 1 - length
        return slot

    # -- per step ----------------------------------------------------------------------------------

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.thinker_to_talker_proj(self.model.embed_tokens(input_ids))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        slot_T = (positions[0] >> SLOT_SHIFT).clamp(0, len(self.prompt_len_S) - 1)
        index_T = positions[0] & ((1 << SLOT_SHIFT) - 1)
        length_T = self.prompt_len_S[slot_T]
        in_prompt_T = index_T < length_T
        at_T = index_T.clamp(max=self.rope_3SL.shape[2] - 1)
        rope_3T = torch.where(
            in_prompt_T, self.rope_3SL[:, slot_T, at_T], index_T + self.rope_delta_S[slot_T]
        )
        hidden_TH = None
        if intermediate_tensors is None:
            assert input_ids is not None
            row_T = torch.minimum(index_T - length_T, self.reply_len_S[slot_T] - 1).clamp(min=0)
            spoken_TD = self.model.embed_tokens(input_ids) + self.reply_SRD[slot_T, row_T]
            spoken_TH = self.thinker_to_talker_proj(spoken_TD)
            hidden_TH = torch.where(
                in_prompt_T.unsqueeze(-1), self.prompt_SLH[slot_T, at_T], spoken_TH
            )
        return self.model(None, rope_3T, intermediate_tensors, inputs_embeds=hidden_TH)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits[..., self.config.tts_codec_start_token_id] = float("-inf")
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
