# SPDX-License-Identifier: Apache-2.0
"""Rename tables for the tensors in Wan's frozen components.

A component's tensors have either Wan's own names (in `.pth` files) or the names that diffusers and
transformers use. `loading.py` uses these tables to load weights, and `layout.py` uses them to
derive network dimensions from tensor shapes.
"""

from vllm_omni.model_executor.checkpoint.loading import Rules

VAE_RULES: Rules = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
    # In Wan 2.2, each level has a list of residual blocks and a resampling layer.
    (
        r"\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.",
        r".down_blocks.\1.downsampler.\2.",
    ),
    (r"\.downsamples\.(\d+)\.downsamples\.(\d+)\.", r".down_blocks.\1.resnets.\2."),
    (r"\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.", r".up_blocks.\1.upsampler.\2."),
    (r"\.upsamples\.(\d+)\.upsamples\.(\d+)\.", r".up_blocks.\1.resnets.\2."),
    # Wan 2.1 has one list for all levels. A decoder level has three residual blocks and an
    # upsampler.
    (r"\.downsamples\.(\d+)\.", r".down_blocks.\1."),
    *(
        (rf"\.upsamples\.{4 * level + block}\.", f".up_blocks.{level}.resnets.{block}.")
        for level in range(4)
        for block in range(3)
    ),
    *(
        (rf"\.upsamples\.{4 * level + 3}\.", f".up_blocks.{level}.upsamplers.0.")
        for level in range(3)
    ),
)
"""Mapping from the tensor names in Wan's 2.1 and 2.2 VAE files to the names in diffusers'
`AutoencoderKLWan`. Names that already follow diffusers do not change.
"""

TEXT_RULES: Rules = (
    (r"^encoder\.embed_tokens\.", "shared."),
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.norm1\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^blocks\.(\d+)\.norm2\.", r"encoder.block.\1.layer.1.layer_norm."),
    (r"^blocks\.(\d+)\.attn\.", r"encoder.block.\1.layer.0.SelfAttention."),
    (
        r"^blocks\.(\d+)\.pos_embedding\.embedding\.",
        r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.",
    ),
    (r"^blocks\.(\d+)\.ffn\.gate\.0\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^blocks\.(\d+)\.ffn\.fc1\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^blocks\.(\d+)\.ffn\.fc2\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
)
"""Mapping from Wan's tensor names for umt5-xxl to the names in transformers' `UMT5EncoderModel`.
Names that already follow transformers do not change.
"""

CLIP_RULES: Rules = (
    (r"^vision_model\.", ""),
    (r"^visual\.", ""),
    (r"^cls_embedding\Z", "embeddings.class_embedding"),
    (r"^patch_embedding\.", "embeddings.patch_embedding."),
    (r"^pos_embedding\Z", "embeddings.position_embedding.weight"),
    (r"^pre_norm\.", "pre_layrnorm."),
    (r"^post_norm\.", "post_layernorm."),
    (r"^transformer\.", "encoder.layers."),
    (r"\.attn\.to_(q|k|v)\.", r".self_attn.\1_proj."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.norm(1|2)\.", r".layer_norm\1."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.2\.", ".mlp.fc2."),
)
"""Mapping from Wan's tensor names for the vision tower to the names in transformers'
`CLIPVisionModel`. It is applied after queries, keys and values have been split into separate
tensors.
"""
