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
    """Serving options that every streaming model has."""

    presets: ClassVar[Mapping[PresetName, Preset]] = {DEFAULT_PRESET: Preset()}
    """Presets of the model family, keyed by name."""

    preset: PresetName = DEFAULT_PRESET
    """Named set of defaults for other options and the precision. `reference`: the release's own
    settings. `balanced`: the same steps and window in FP8. `realtime`: fewer steps, a shorter
    window and the tiny decoder. `small`: for GPUs with 12 to 24 GB. A family may offer only some of
    these presets. Any option set explicitly overrides the preset (docs/how_to/presets.md).
    """
    fp8: bool | None = None
    """Whether to use the FP8 weights, keys and values of the preset. False: weights, keys and
    values remain in `--dtype`. True: FP8 is also used on a device without FP8 units, such as a CPU,
    where it saves memory but no time. Default: FP8 is used, and a device without FP8 units is
    refused.
    """
    max_steps: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Maximum number of denoise steps per chunk. A longer schedule is reduced to evenly spaced
    steps, which always include the noisiest one. Default: all steps.
    """
    first_chunk_steps: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Maximum number of denoise steps of a session's first chunk. With fewer steps, a session's
    first frames arrive earlier but contain less detail. If the window has sink frames, all later
    chunks attend to these frames. Default: `max_steps`.
    """
    latent_frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    """Number of latent frames in each chunk. Default: the checkpoint's value, or the model's if the
    checkpoint has none.
    """
    first_chunk_latent_frames: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    """Number of latent frames in a session's first chunk. Default: `latent_frames_per_chunk`."""
    window_frames: Annotated[int, msgspec.Meta(ge=-1, le=4096)] | None = None
    """Number of latent frames that a chunk attends to, including the sink frames and the chunk
    itself. -1: all frames of the session (global attention, at most 21). Default: the checkpoint's
    value, or the model's if the checkpoint has none.
    """
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    """Number of latent frames at the start of a session that always remain in the window. Default:
    the checkpoint's value, or the model's if the checkpoint has none.
    """
    context_kv: ContextKV = "clean_pass"
    """Keys and values that later chunks attend to. `clean_pass`: those of an additional pass over
    the final latents, as in training. `last_step`: those of the last denoise step. This setting
    saves the additional pass, but the latents of the last step still contain noise. The
    clean-context pass always runs for the first chunk, for chunks that contain sink frames, and for
    chunks with one denoise step.
    """
    text_encoder_device: Literal["cpu"] | None = None
    """Device of the text encoder. `cpu` saves device memory (10.6 GiB for umt5-xxl). Default: the
    device of the transformer."""
    decoder: Literal["wan", "tiny"] = "wan"
    """Network that decodes latents to frames: Wan's VAE, or the tiny autoencoder TAEHV, which is
    much cheaper but only approximates Wan's VAE. TAEHV is read from `taew2_1.pth` in the
    checkpoint's directory, or from `taew2_2.pth` for models with Wan 2.2's VAE.
    """
    cuda_graphs: bool | None = None
    """Whether to replay repeated forward passes as CUDA graphs. A replay needs only a fraction of
    the host time that launching the kernels needs. Default: true on CUDA for at most 3072 channels
    per GPU or if the preset sets it, unless the engine runs with --enforce-eager or
    --cpu-offload-gb. Wider networks keep the device busy without graphs.
    """

    @classmethod
    def read_options(
        cls, options: Mapping[str, Any], release: Mapping[str, Any] | None = None
    ) -> Self:
        """Parse the options under `omni.model`, apply their preset, and check the shared options.

        Args:
            options: Options under `omni.model` that the user and the world description set.
            release: The release's default options. A preset overrides them.

        Raises:
            ValueError: An option is unknown or has an unsupported value. The error message names
                the option.
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
            options: Options under `omni.model`.

        Raises:
            ValueError: `read_options` does not accept the options, or one of them is fixed.
        """
        if given := [name for name in fixed if name in options]:
            raise ValueError(
                f"omni.model: remove {', '.join(given)}: this model's checkpoint fixes "
                f"{', '.join(fixed)}"
            )
        return cls.read_options(options)
