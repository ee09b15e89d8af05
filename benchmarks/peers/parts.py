# SPDX-License-Identifier: Apache-2.0
"""Defines the parts of the comparison, and the packages that each part needs."""

from dataclasses import dataclass

OURS = "ours"


@dataclass(frozen=True)
class Package:
    """Packages that `prepare` puts into a peer's Python path, in addition to `common`."""

    left_out: tuple[str, ...] = ()
    """`fnmatch` patterns for files in the wheels that no part needs. The matching files take up
    most of the space.
    """
    source: str | None = None
    """Instructions for getting a package that is not in a registry."""


PACKAGES = {
    "common": Package(("diffusers/pipelines/*/*_flax*",)),
    "vllm_omni": Package(
        (
            "vllm/vllm-rs",
            "vllm/benchmarks/*",
            "vllm/_moe_C*",
            "vllm/_flash*_C*",
            "vllm/_deep*_C*",
            "vllm/_qutlass*",
            "vllm/_rocm*",
            "vllm/vllm_flash_attn/_vllm_fa2_C*",
            "vllm/third_party/deep_gemm/*",
            "vllm/third_party/fmha_sm100/*",
            "vllm_omni/assets/*",
        )
    ),
    "sglang": Package(
        (
            "sglang/srt/rust_extensions/*",
            "sglang/srt/mem_cache/rust_tree_core/*",
            "sglang/test/*",
            "sglang/benchmark/*",
            "sglang/multimodal_gen/test/*",
            "sglang/multimodal_gen/apps/*",
        )
    ),
    "telefuser": Package(),
    "flashdreams": Package(
        source="the folders flashdreams, lingbot and self_forcing of NVIDIA/flashdreams at commit "
        "d5c4ce0cc30256088afc5a895f8681a8795a436e"
    ),
}


@dataclass(frozen=True)
class Part:
    """One measurement that runs in a separate process."""

    model: str
    """Model that the part runs. Parts with the same model are compared with each other."""
    package: str
    """Key in `PACKAGES`, or `OURS`."""
    script: str
    """Script to run: a peer's driver, or one of this project's benchmarks."""
    options: tuple[str, ...] = ()
    limit_s: int = 150
    """Time limit for the process in seconds, including startup, compilation and all chunks."""


FP8 = ("--quantization", "fp8_per_channel", "--kv-cache-dtype", "fp8")
TWELVE = ("--chunks", "12")


def peer_part(model: str, package: str, variant: str, limit_s: int) -> Part:
    return Part(model, package, f"drive_{package}.py", ("--variant", variant), limit_s)


PARTS = {
    "ours_bf16": Part("lingbot_world", OURS, "lingbot_world.py", TWELVE),
    "ours_fp8": Part("lingbot_world", OURS, "lingbot_world.py", (*TWELVE, *FP8)),
    "sglang_best": peer_part("lingbot_world", "sglang", "best", 240),
    "sglang_recipe": peer_part("lingbot_world", "sglang", "recipe", 240),
    "telefuser_best": peer_part("lingbot_world", "telefuser", "best", 240),
    "telefuser_recipe": peer_part("lingbot_world", "telefuser", "recipe", 150),
    "omni_best": peer_part("lingbot_world", "vllm_omni", "best", 240),
    "omni_recipe": peer_part("lingbot_world", "vllm_omni", "recipe", 180),
    "flashdreams": peer_part("lingbot_world", "flashdreams", "recipe", 330),
    "ours_causal_wan": Part("causal_wan", OURS, "streaming_wan.py", TWELVE),
    "sglang_causal_wan": peer_part("causal_wan", "sglang", "causal_wan", 200),
}
BASELINES = {"lingbot_world": "ours_bf16", "causal_wan": "ours_causal_wan"}
"""Maps each model to its baseline part. The other parts' times are divided by the baseline's time.
"""
OURS_TINY = {
    "lingbot_world.py": ("--tiny", "--height", "64", "--width", "96", "--eager", "--chunks", "8"),
    "streaming_wan.py": (
        *("--size", "tiny", "--height", "64", "--width", "96", "--eager", "--chunks", "8"),
    ),
}
"""Options for a dry run of this project's benchmarks on the CPU."""
