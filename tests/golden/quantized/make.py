# SPDX-License-Identifier: Apache-2.0
"""Write the quantized transformers in this folder, each with the library that defines its format.

    python tests/golden/quantized/make.py FORMAT [FORMAT ...]

README.md in this folder describes the files.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from vllm_omni.testing.tiny.quantized import SIZES, draw

HERE = Path(__file__).parent
FILE = "diffusion_pytorch_model.safetensors"
KEPT = ("proj_out", "condition_embedder")


def plain() -> WanTransformer3DModel:
    model = WanTransformer3DModel(**SIZES)
    draw(model)
    return model.to(torch.bfloat16).eval()


def by_modelopt(recipe: str, out: Path) -> None:
    """Quantize with NVIDIA ModelOpt, calibrated on two random inputs. By default, ModelOpt does not
    quantize `proj_out`.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: WanTransformer3DModel) -> None:
        generator = torch.Generator().manual_seed(0)
        for timestep in (900.0, 300.0):
            latents = torch.randn(1, SIZES["in_channels"], 3, 4, 6, generator=generator).bfloat16()
            text = torch.randn(1, 8, SIZES["text_dim"], generator=generator).bfloat16()
            model(
                hidden_states=latents, timestep=torch.tensor([timestep]), encoder_hidden_states=text
            )

    model = plain()
    mtq.quantize(model, getattr(mtq, recipe), calibrate)
    export_hf_checkpoint(model, export_dir=out)


def by_llmcompressor(scheme: str, out: Path) -> None:
    """Quantize with llmcompressor's `model_free_ptq`, which writes compressed-tensors."""
    from llmcompressor import model_free_ptq

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        plain().save_pretrained(source)
        (source / FILE).rename(source / "model.safetensors")
        retained = [
            *(f"re:.*{name}.*" for name in KEPT),
            "re:.*scale_shift_table",
            "re:.*patch_embedding",
            "re:.*norm.*",
        ]
        model_free_ptq(str(source), str(out), scheme=scheme, ignore=retained, device="cpu")
    (out / "model.safetensors").rename(out / FILE)
    (out / "model.safetensors.index.json").unlink()


def by_torchao(config: Any, out: Path) -> None:
    """Quantize with torchao's `quantize_`, and store with `flatten_tensor_state_dict`."""
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    model = plain()
    model.save_config(out)
    quantize_(
        model,
        config,
        filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "blocks" in name,
    )
    tensors, metadata = flatten_tensor_state_dict(
        {name: value.data for name, value in model.state_dict().items()}
    )
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        out / FILE,
        {**metadata, "format": "pt"},
    )
    described = json.loads((out / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(config)},
        "modules_to_not_convert": list(KEPT),
    }
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def make(name: str) -> None:
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    library, _, kind = name.partition("_")
    if library == "modelopt":
        by_modelopt({"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}[kind], out)
    elif library == "llmcompressor":
        by_llmcompressor({"fp8": "FP8_DYNAMIC", "int8": "W8A8", "nvfp4": "NVFP4A16"}[kind], out)
    else:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        by_torchao(
            {"fp8": Float8WeightOnlyConfig(), "int8": Int8WeightOnlyConfig(version=2)}[kind], out
        )


for each in sys.argv[1:]:
    make(each)
