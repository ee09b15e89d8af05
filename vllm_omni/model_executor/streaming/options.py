# SPDX-License-Identifier: Apache-2.0
"""`StreamingOptions`: options under `omni.model` that all streaming video models share.

Each model adds its own options in a subclass, in its `config.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from vllm_omni.config import parse_options
from vllm_omni.model_executor.model_options import ModelOptions
from vllm_omni.model_executor.presets import DEFAULT_PRESET, Preset, PresetName

ContextKV = Literal["clean_pass", "last_step"]


class StreamingOptions(ModelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options of every streaming model."""

    presets: ClassVar[Mapping[PresetName, Preset]] = {DEFAULT_PRESET: Preset()}
    """Presets of the family."""

    preset: PresetName = DEFAULT_PRESET
    """Named defaults of other options and of the precision. `reference`: the release's own
    settings. `balanced`: the same steps and window in FP8. `realtime`: fewer steps, a shorter
    window and the tiny decoder. `small`: for GPUs with 12 to 24 GB. A family may offer fewer. Any
    option that is set overrides the preset (docs/how_to/presets.md)."""
    fp8: bool | None = None
    """Whether to use the FP8 weights, keys and values of the preset. False: they remain in
    `--dtype`. True: they are also used on a device without FP8 units, such as a CPU, where FP8
    saves memory but no time. Default: they are used, and a device without FP8 units is refused.
    """
    max_steps: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Maximum number of denoise steps of a chunk. A longer schedule is reduced to steps at even
    distances, always including the noisiest one. Default: all steps.
    """
    latent_frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    """Latent frames of each chunk. Default: the value of the checkpoint, otherwise that of the
    model.
    """
    first_chunk_latent_frames: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    """Latent frames of a session's first chunk. Default: `latent_frames_per_chunk`."""
    window_frames: Annotated[int, msgspec.Meta(ge=-1, le=4096)] | None = None
    """Number of latent frames that a chunk attends to, including the sink frames and the chunk. -1:
    all frames of the session (global attention, at most 21). Default: the value of the checkpoint,
    otherwise that of the model.
    """
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    """Number of latent frames at the start of a session that always remain in the window. Default:
    the value of the checkpoint, otherwise that of the model.
    """
    context_kv: ContextKV = "clean_pass"
    """Keys and values that later chunks attend to: those of a `clean_pass` over the final latents,
    as in training, or those of the `last_step` of denoising, whose latents still contain noise but
    which saves the pass. The first chunk, chunks with sink frames and chunks with a single step
    always have the clean-context pass.
    """
    text_encoder_device: Literal["cpu"] | None = None
    """Device of the text encoder. `cpu` saves device memory (10.6 GiB for umt5-xxl). Default: the
    device of the transformer."""
    decoder: Literal["wan", "tiny"] = "wan"
    """Decoder of the latents: Wan's VAE, or the tiny autoencoder TAEHV (`taew2_1.pth` or, of models
    with Wan 2.2's VAE, `taew2_2.pth` in the checkpoint's directory), which is much cheaper and only
    approximates Wan's VAE."""
    cuda_graphs: bool | None = None
    """Replay repeated forward passes as CUDA graphs, which takes the host a fraction of the launch
    time. Default: true on CUDA for at most 3072 channels per GPU, because wider networks keep the
    device busy without graphs, unless the engine runs with --enforce-eager or --cpu-offload-gb.
    """

    @classmethod
    def read_options(
        cls, options: Mapping[str, Any], release: Mapping[str, Any] | None = None
    ) -> Self:
        """Parse `omni.model` with its preset, and check the shared options.

        Args:
            options: `omni.model` of the user and of the world description.
            release: Options of the release, which a preset overrides.

        Raises:
            ValueError: An option is unknown or has an unsupported value. The message names it.
        """
        chosen = options.get("preset", DEFAULT_PRESET)
        found = (preset for name, preset in cls.presets.items() if name == chosen)
        values = {**(release or {}), **next(found, Preset()).defaults(options), **options}
        parsed = parse_options(cls, values, "omni.model")
        if parsed.preset not in cls.presets:
            raise ValueError(
                f"omni.model: this model has no preset {parsed.preset!r}; allowed: "
                f"{', '.join(cls.presets)}"
            )
        if parsed.window_frames == 0:
            raise ValueError("omni.model: window_frames must be -1 (global) or >= 1, got 0")
        return parsed

    @classmethod
    def read_unless(cls, fixed: Sequence[str], options: Mapping[str, Any]) -> Self:
        """Parse the options of a model whose checkpoint fixes some of them.

        Args:
            fixed: Names of the options that the checkpoint fixes.
            options: `omni.model`.

        Raises:
            ValueError: As `read_options`, or a fixed option is given.
        """
        if given := [name for name in fixed if name in options]:
            raise ValueError(
                f"omni.model: remove {', '.join(given)}: this model's checkpoint fixes "
                f"{', '.join(fixed)}"
            )
        return cls.read_options(options)
