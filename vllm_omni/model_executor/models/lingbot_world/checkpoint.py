# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a LingBot World checkpoint are: the original folders, the v2 folder, the diffusers folders.

Only looks; `weights.py` loads. A piece that is missing is not an error until it is needed (`require`), so that an
engine with dummy weights starts from configs alone, and a stage that decodes nothing needs no VAE.
Held by tests/model_executor/models/lingbot_world/test_checkpoint.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.weights import TEXT_RULES, VAE_RULES, rename
from vllm_omni.model_executor.models.wan.components import UMT5_XXL, VAEConfig
from vllm_omni.model_executor.tensor_files import confined, open_tensors, read_json

Piece = Literal["transformer", "vae", "text_encoder", "tokenizer"]

LAYOUTS = ("original", "diffusers", "v2")
"""The real layouts this file understands, by the names `make-tiny` takes."""

_FAST_FOLDERS = ("lingbot_world_fast", "Lingbot-World-Fast")
_TRANSFORMER_FOLDERS = (*_FAST_FOLDERS, "transformers", "transformer")
"""Original v1 under both names in use, original v2, diffusers."""

_PLACES: dict[Piece, tuple[str, ...]] = {
    "vae": ("Wan2.1_VAE.pth", "Wan2.1_VAE.safetensors", "vae"),
    "text_encoder": ("models_t5_umt5-xxl-enc-bf16.pth", "models_t5_umt5-xxl-enc-bf16.safetensors", "text_encoder"),
    "tokenizer": ("google/umt5-xxl", "tokenizer"),
}
_CLASSES = ("WanModelFast", "CausalLingBotWorldTransformer3DModel", "LingBotWorldTransformer3DModel")
_NOT_FAST = ("high_noise_model", "low_noise_model")
"""The base model's experts: same keys, but not distilled and not causal."""


@dataclass(frozen=True)
class CheckpointLayout:
    """The resolved places of a checkpoint's pieces; None = not there.

    root: the folder that holds them. kind: whose layout it is. version: the network generation (schedule defaults).
    transformer: a folder of safetensors. vae, text_encoder: a `.pth`/`.safetensors` file or a folder.
    """

    root: Path
    kind: Literal["original", "diffusers"]
    version: Literal["v1", "v2"]
    transformer: Path
    vae: Path | None
    text_encoder: Path | None
    tokenizer: Path | None

    def require(self, *pieces: Piece) -> None:
        """Raise ValueError of one line unless the named pieces are there with their weights."""
        missing = [piece for piece in pieces if not self._present(piece)]
        if missing:
            wanted = "; ".join(f"{piece}: {' or '.join(_PLACES.get(piece, ('*.safetensors',)))}" for piece in missing)
            raise ValueError(
                f"{self.root} lacks {', '.join(missing)} (looked for {wanted}); complete it with "
                f"`vllm-omni download lingbot_world_fast {self.root}` or start with --load-format dummy"
            )

    def _present(self, piece: Piece) -> bool:
        places: dict[Piece, Path | None] = {
            "transformer": self.transformer,
            "vae": self.vae,
            "text_encoder": self.text_encoder,
            "tokenizer": self.tokenizer,
        }
        place = places[piece]
        if place is None or not place.is_dir():
            return place is not None
        return any(place.glob("tokenizer*.json" if piece == "tokenizer" else "*.safetensors"))

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's `config.json`; empty = the checkpoint has none, it is the released model."""
        path = self.transformer / "config.json"
        return read_json(path) if path.exists() else {}

    def vae_config(self) -> VAEConfig:
        """Return the VAE's architecture from its config, else from its weights' shapes, else the released one."""
        if self.vae is not None and (self.vae / "config.json").exists():
            return VAEConfig.from_dict(read_json(self.vae / "config.json"))
        if self.vae is None or self.vae.is_dir():
            return VAEConfig()
        base = self._shape(self.vae, "encoder.conv_in.weight", VAE_RULES)[0]
        return VAEConfig(base_dim=base, z_dim=self._shape(self.vae, "post_quant_conv.weight", VAE_RULES)[0])

    def text_config(self) -> dict[str, Any]:
        """Return `UMT5Config` values from the encoder's config, else its weights' shapes, else the released ones."""
        if self.text_encoder is not None and (self.text_encoder / "config.json").exists():
            config = read_json(self.text_encoder / "config.json")
            if config.get("model_type") != "umt5":
                raise ValueError(
                    f"{self.text_encoder}/config.json has model_type {config.get('model_type')!r}, not 'umt5'"
                )
            return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype", "architectures")}
        if self.text_encoder is None or self.text_encoder.is_dir():
            return dict(UMT5_XXL)
        attention = "encoder.block.0.layer.0.SelfAttention"
        vocab_size, d_model = self._shape(self.text_encoder, "shared.weight", TEXT_RULES)
        num_heads = self._shape(self.text_encoder, f"{attention}.relative_attention_bias.weight", TEXT_RULES)[1]
        names = {rename(name, TEXT_RULES) for name in open_tensors(self.text_encoder).shapes}
        return {
            **UMT5_XXL,
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_kv": self._shape(self.text_encoder, f"{attention}.q.weight", TEXT_RULES)[0] // num_heads,
            "d_ff": self._shape(self.text_encoder, "encoder.block.0.layer.1.DenseReluDense.wo.weight", TEXT_RULES)[1],
            "num_layers": sum(name.endswith(".SelfAttention.q.weight") for name in names),
            "num_heads": num_heads,
        }

    @staticmethod
    def _shape(path: Path, wanted: str, rules: Any) -> tuple[int, ...]:
        for name, shape in open_tensors(path).shapes.items():
            if rename(name, rules) == wanted:
                return tuple(shape)
        raise ValueError(f"{path} holds no tensor for {wanted}; it is not the file its name says, download it again")


def find_layout(path: Path) -> CheckpointLayout:
    """Find the pieces below (or, when `path` is the transformer's own folder, beside) `path`.

    Raises ValueError of one line that says what was found and what is looked for.
    """
    folder = next((path / name for name in _TRANSFORMER_FOLDERS if _is_transformer(path / name)), None)
    if folder is not None:
        root = path
    elif _is_transformer(path):
        folder, root = path, (path.parent if _beside(path.parent) else path)
    else:
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) if path.is_dir() else "no folder"
        raise ValueError(
            f"{path} holds no LingBot World transformer (found {found or 'nothing'}); expected one of "
            f"{', '.join(f'{name}/' for name in _TRANSFORMER_FOLDERS)} with config.json or *.safetensors"
        )
    places = {piece: _first_place(root, names) for piece, names in _PLACES.items()}
    is_v2 = folder.name == "transformers" or "lingbot-world-v2" in str(path.resolve()).lower()
    return CheckpointLayout(
        root=root,
        kind="diffusers" if folder.name == "transformer" else "original",
        version="v2" if is_v2 else "v1",
        transformer=folder,
        vae=places["vae"],
        text_encoder=places["text_encoder"],
        tokenizer=places["tokenizer"],
    )


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a LingBot World checkpoint in any layout. Cheap, never raises."""
    try:
        find_layout(path)
    except (ValueError, OSError):
        return any((path / name).is_dir() for name in _FAST_FOLDERS)  # ours but damaged: let `hf_config` say how
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return what vLLM's config object carries for this checkpoint, JSON types only; needs no weight files.

    Besides the keys vLLM reads: `lingbot_world` with `transformer` (its config as stored, empty = released model),
    `vae` and `umt5` (architectures in diffusers' and transformers' keys), `kind` and `version`. Raises ValueError.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = LingBotWorldConfig.from_checkpoint(transformer)
    text = layout.text_config()
    if text["d_model"] != config.text_dim:
        raise ValueError(
            f"{layout.root}: the text encoder gives rows of {text['d_model']}, the transformer takes "
            f"{config.text_dim}; the two belong to different checkpoints"
        )
    vae = layout.vae_config()
    if vae.z_dim != config.out_channels:
        raise ValueError(
            f"{layout.root}: the VAE has {vae.z_dim} latent channels, the transformer {config.out_channels}"
        )
    return {
        "architectures": ["LingBotWorldPipeline"],
        "dtype": str(transformer.get("dtype") or transformer.get("torch_dtype") or "bfloat16"),
        "hidden_size": config.dim,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": 16,
        "lingbot_world": {
            "transformer": transformer,
            "vae": vae.to_dict(),
            "umt5": text,
            "kind": layout.kind,
            "version": layout.version,
        },
    }


def _is_transformer(folder: Path) -> bool:
    """Whether `folder` is a LingBot World transformer, by its config, else by its name and weight names."""
    if not folder.is_dir() or folder.name in _NOT_FAST:
        return False
    if (folder / "config.json").exists():
        config = read_json(folder / "config.json")
        return (
            config.get("_class_name") in _CLASSES
            or config.get("control_type") == "cam"
            or config.get("model_type") in ("lingbot_world_fast", "lingbot_world")
        )
    if not any(folder.glob("*.safetensors")):
        return False
    return folder.name in _FAST_FOLDERS or "patch_embedding_wancamctrl.weight" in open_tensors(folder).shapes


def _beside(root: Path) -> bool:
    return any(_first_place(root, names) is not None for names in _PLACES.values())


def _first_place(root: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        place = root / name
        if place.is_dir():
            return place
        if place.is_file():
            return confined(place.parent, place.name)
    return None
