# SPDX-License-Identifier: Apache-2.0
"""Locate the components of a Lance checkpoint, given the repository's root or one of its folders.

    Lance_3B/ or Lance_3B_Video/   llm_config.json, model.safetensors (or ema.safetensors),
    tokenizer.json
    Qwen2.5-VL-ViT/                config.json, vit.safetensors; the video checkpoint includes the
    tower as well
    Wan2.2_VAE.pth

This module only locates files; `weights.py` loads them. A missing component is an error only when
it is needed (`require`), so an engine with dummy weights can start from config files alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.model_executor.checkpoint.tensor_files import confined, open_tensors, read_json
from vllm_omni.model_executor.models.lance.config import (
    DEFAULTS,
    LATENT_CHANNELS,
    LanceConfig,
    VisionConfig,
)

IMAGE_FOLDER, VIDEO_FOLDER, VISION_FOLDER = "Lance_3B", "Lance_3B_Video", "Qwen2.5-VL-ViT"
LAYOUTS = ("image", "video", "repository")
"""Layouts that `make-tiny` can write: a repository that contains the image decoder, the video
decoder, or both.
"""

_WEIGHTS = ("model.safetensors", "ema.safetensors")
_VAE = ("Wan2.2_VAE.pth", "Wan2.2_VAE.safetensors")
_BASE_DIM, _DECODER_BASE_DIM = 160, 256


@dataclass(frozen=True)
class LanceLayout:
    """Paths of a checkpoint's components. The path of a missing component is None."""

    root: Path
    """The repository's root folder."""
    decoder: Path
    """The decoder's folder, which contains `llm_config.json`."""
    weights: Path | None
    """The decoder's weight file, or None if it is missing."""
    tokenizer: Path | None
    """Path of `tokenizer.json`, or None if it is missing."""
    vision: Path | None
    """The vision tower's folder, or None if it is missing."""
    vae: Path | None
    """The autoencoder's weight file, or None if it is missing."""

    @property
    def video(self) -> bool:
        return self.decoder.name == VIDEO_FOLDER

    @property
    def vision_weights(self) -> Path | None:
        """Return the vision tower's own weight file, or None if it does not exist."""
        if self.vision is None:
            return None
        files = sorted(self.vision.glob("*.safetensors"))
        return confined(self.vision, files[0].name) if files else None

    def require(self) -> None:
        """Raise ValueError with a one-line message if the decoder's weights, the tokenizer or the
        VAE is missing.
        """
        missing = []
        if self.weights is None:
            missing.append(f"{self.decoder.name}/{' or '.join(_WEIGHTS)}")
        if self.tokenizer is None:
            missing.append(f"{self.decoder.name}/tokenizer.json")
        if self.vae is None:
            missing.append(" or ".join(_VAE))
        if missing:
            raise ValueError(
                f"{self.root} lacks {', '.join(missing)}; complete it with `vllm-omni download "
                f"lance {self.root}` or "
                "start with --load-format dummy"
            )

    def llm_config(self) -> dict[str, Any]:
        path = self.decoder / "llm_config.json"
        return read_json(path) if path.exists() else {}

    def vision_config(self) -> dict[str, Any]:
        """Return the vision tower's config, read from the tower's folder or, failing that, from the
        decoder's config. An empty result stands for the released config.
        """
        if self.vision is not None and (self.vision / "config.json").exists():
            values = read_json(self.vision / "config.json")
            nested = values.get("vision_config")
            return nested if isinstance(nested, dict) else values
        nested = self.llm_config().get("vision_config")
        return nested if isinstance(nested, dict) else {}

    def max_latent_frames(self) -> int:
        """Return the number of latent frames in the stored position table or, without weights, in
        the released checkpoint's table.
        """
        released = DEFAULTS.max_num_video_latent_frames if self.video else 1
        if self.weights is None:
            return released
        shape = open_tensors(self.weights).shapes.get("latent_pos_embed.pos_embed")
        cells = DEFAULTS.max_latent_size**2
        if shape is None or len(shape) != 2 or shape[0] % cells:
            raise ValueError(
                f"{self.weights} holds no latent_pos_embed.pos_embed of a multiple of {cells} "
                "rows; it is not a Lance "
                "decoder, download it again"
            )
        return max(1, shape[0] // cells)

    def vae_dims(self) -> tuple[int, int]:
        """Return the first-level widths of the encoder and the decoder, read from the autoencoder's
        file. If that file is missing, return the released widths.
        """
        if self.vae is None:
            return _BASE_DIM, _DECODER_BASE_DIM
        shapes = open_tensors(self.vae).shapes
        names = ("encoder.conv1.weight", "decoder.conv1.weight", "conv2.weight")
        if (
            any(name not in shapes for name in names)
            or shapes["conv2.weight"][0] != LATENT_CHANNELS
        ):
            raise ValueError(
                f"{self.vae} is no Wan 2.2 autoencoder of {LATENT_CHANNELS} channels; download "
                "it again"
            )
        return shapes[names[0]][0], shapes[names[1]][0] // 4

    def dtype(self) -> str:
        """Return the decoder's dtype, read from its config or, failing that, from its weights."""
        stated = self.llm_config()
        for key in ("dtype", "torch_dtype"):
            if isinstance(stated.get(key), str):
                return str(stated[key]).removeprefix("torch.")
        if self.weights is None:
            return "bfloat16"
        return str(next(iter(open_tensors(self.weights).dtypes.values()))).removeprefix("torch.")


def find_layout(path: Path) -> LanceLayout:
    """Locate the components in `path`. If `path` is one of the repository's folders, also look next
    to it.

    If the repository contains both decoders, the image decoder is used. To use the video decoder,
    pass its folder.

    Raises:
        ValueError: `path` does not contain a decoder. The message is one line that states what was
            found and what was expected.
    """
    root, chosen = path, None
    if (
        path.name in (IMAGE_FOLDER, VIDEO_FOLDER, VISION_FOLDER)
        and _first(path.parent, _VAE) is not None
    ):
        root = path.parent
        chosen = None if path.name == VISION_FOLDER else path
    candidates = (
        [chosen] if chosen is not None else [root / IMAGE_FOLDER, root / VIDEO_FOLDER, root]
    )
    decoder = next(
        (folder for folder in candidates if (folder / "llm_config.json").is_file()), None
    )
    if decoder is None:
        found = (
            ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
            if path.is_dir()
            else "no folder"
        )
        raise ValueError(
            f"{path} holds no Lance decoder (found {found or 'nothing'}); expected {IMAGE_FOLDER}/ "
            f"or {VIDEO_FOLDER}/ "
            "with llm_config.json"
        )
    vision = root / VISION_FOLDER
    return LanceLayout(
        root=root,
        decoder=decoder,
        weights=_first(decoder, _WEIGHTS),
        tokenizer=_first(decoder, ("tokenizer.json",)),
        vision=vision if vision.is_dir() else None,
        vae=_first(root, _VAE) or _first(decoder, _VAE),
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a Lance checkpoint. The check is cheap and never raises."""
    try:
        find_layout(path)
    except (ValueError, OSError):
        # A damaged checkpoint is also attributed to this family, so that `hf_config` can report
        # what is wrong with it.
        return (path / IMAGE_FOLDER).is_dir() or (path / VIDEO_FOLDER).is_dir()
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return the fields of vLLM's config object for this checkpoint. The values have JSON types.

    No weight files are required. In addition to the keys that vLLM reads, the result has a `lance`
    key. Its value contains `llm` and `vision` (the configs as stored), `max_latent_frames` and
    `vae_dims`.
    """
    layout = find_layout(path)
    llm, vision = layout.llm_config(), layout.vision_config()
    frames = layout.max_latent_frames()
    config = LanceConfig.from_checkpoint(llm, vision, max_latent_frames=frames)
    return {
        "architectures": ["LancePipeline"],
        "dtype": layout.dtype(),
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 16,
        "lance": {
            "llm": llm,
            "vision": VisionConfig.from_dict(vision).to_dict(),
            "max_latent_frames": frames,
            "vae_dims": list(layout.vae_dims()),
        },
    }


def lance_config(stored: dict[str, Any]) -> LanceConfig:
    """Return the architecture that `hf_config(...)["lance"]` describes."""
    return LanceConfig.from_checkpoint(
        stored["llm"], stored["vision"], max_latent_frames=stored["max_latent_frames"]
    )


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        if (folder / name).is_file():
            return confined(folder, name)
    return None
