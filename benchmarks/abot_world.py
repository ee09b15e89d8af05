# SPDX-License-Identifier: Apache-2.0
"""Measure ABot-World-0 at full size with random weights in the real engine.

The benchmark reports frames per second, the time to the first frame, and stage times.

    # one GPU, 704x1280, window 21, 4 steps, five references, tiny decoder
    python benchmarks/abot_world.py
    python benchmarks/abot_world.py --quantization fp8_per_channel --kv-cache-dtype fp8
    python benchmarks/abot_world.py --height 480 --width 832
    python benchmarks/abot_world.py --tensor-parallel 2 \\
        --model-options '{"sequence_parallel": true}'
    python benchmarks/abot_world.py --references 0 --model-options '{"decoder": "wan"}'
    # try it without a GPU
    python benchmarks/abot_world.py --tiny --height 64 --width 96 --eager --chunks 10

Random weights with the released shapes give the same times as trained weights. Steady-state values
are medians over all chunks after the window is full. Chunks are measured end to end, from the
controls to the uint8 frames. Each chunk is requested while its predecessor is running. The time to
the first frame includes encoding all images. The model's authors report 16 frames per second on an
RTX 5090 with FP8.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import save
from matrix_game import add_arguments, run

AUTHORS_FPS = 16.0
TINY_VAE_CHANNELS = (256, 128, 64, 64)


def write_checkpoint(root: Path) -> None:
    """Write a checkpoint directory for the released architecture, to be loaded with --load-format
    dummy. Its only weights are the tiny decoder's, because the decoder's layer widths are read from
    its weight file. The directory also contains a tokenizer.
    """
    from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
    from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer
    from vllm_omni.testing.tiny.wan import write_tiny_vae

    root.mkdir(parents=True)
    config = {"_class_name": "WanModel", "model_type": "ti2v", "act_control_in_dim": 32}
    (root / "config.json").write_text(json.dumps(config))
    write_t5_tokenizer(root / "google" / "umt5-xxl")
    write_tiny_vae(root / "taew2_2.pth", 0, TINY_VAE_CHANNELS, WAN_2_2_VAE)


def main() -> None:
    from vllm_omni.actions import image_tensor
    from vllm_omni.model_executor.models.abot_world.config import REFERENCES
    from vllm_omni.model_executor.models.registry import get_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=int, default=len(REFERENCES))
    add_arguments(parser, name="abot_world", size=(704, 1280), warm_chunks=9)
    args = parser.parse_args()
    args.variant, args.prompt, args.authors_fps = "0-5B-LF", None, AUTHORS_FPS
    args.actions = [["w", "l"]] * 3
    args.image_tensors = [image_tensor(name) for name in REFERENCES[: args.references]]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "world"
        if args.tiny:
            get_family("abot_world").make_tiny(model, 0, "original")
        else:
            write_checkpoint(model)
        result = asyncio.run(run(model, args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
