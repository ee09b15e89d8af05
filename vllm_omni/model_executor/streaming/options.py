# SPDX-License-Identifier: Apache-2.0
"""`StreamingOptions`: the serving options that every streaming video model has, under `omni.model`.

A model adds its own in a subclass of its `config.py`. Held by
tests/model_executor/models/causal_wan/test_causal_wan_config.py and
tests/model_executor/models/lingbot_world/test_lingbot_config.py.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec

from vllm_omni.config import parse_options
from vllm_omni.model_executor.model_options import ModelOptions


class StreamingOptions(ModelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`ModelOptions`, and those of every streaming model.

    latent_frames_per_chunk: None = the checkpoint's, else the model's default.
        first_chunk_latent_frames: of a session's first chunk; None = the same.
    window_frames: latent frames a chunk sees, sinks and itself included; -1 = all (global
        attention, 21 at most). None = the checkpoint's, else the model's default. sink_frames:
        first frames kept for ever.
    text_encoder_device: None = beside the transformer; `cpu` saves device memory (10.6 GiB for
    umt5-xxl).
    decoder: `wan`, or `tiny` (TAEHV, `taew2_1.pth` in the checkpoint's directory; much cheaper, not
    exact).
    cuda_graphs: launch forwards that come again as CUDA graphs, which the host does in a fraction
        of the time. None = on CUDA for at most 2560 channels a GPU (wider networks keep it busy
        without), unless the engine runs with --enforce-eager or --cpu-offload-gb.
    """

    latent_frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    first_chunk_latent_frames: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    window_frames: Annotated[int, msgspec.Meta(ge=-1, le=4096)] | None = None
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    text_encoder_device: Literal["cpu"] | None = None
    decoder: Literal["wan", "tiny"] = "wan"
    cuda_graphs: bool | None = None

    @classmethod
    def read_options(cls, options: Mapping[str, Any]) -> Self:
        """Read `omni.model` and check the shared options.

        Raises ValueError with the value and the allowed ones.
        """
        parsed = parse_options(cls, options, "omni.model")
        if parsed.window_frames == 0:
            raise ValueError("omni.model: window_frames must be -1 (global) or >= 1, got 0")
        return parsed

    @classmethod
    def read_unless(cls, fixed: Sequence[str], options: Mapping[str, Any]) -> Self:
        """`read` for a model whose checkpoint fixes the options `fixed`.

        Raises ValueError for these, too.
        """
        if given := [name for name in fixed if name in options]:
            raise ValueError(
                f"omni.model: drop {', '.join(given)}: this model's checkpoint leaves no choice of "
                f"{', '.join(fixed)}"
            )
        return cls.read_options(options)
