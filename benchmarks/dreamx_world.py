# SPDX-License-Identifier: Apache-2.0
"""Measure DreamX-World-5B at full size with random weights in the real engine.

The benchmark reports frames per second, the time to the first frame, and stage times.

    # one GPU, 704x1280, window 12, 4 steps
    python benchmarks/dreamx_world.py --model-options '{"decoder": "tiny"}'
    python benchmarks/dreamx_world.py --model-options '{"decoder": "tiny"}' \\
        --quantization fp8_per_channel --kv-cache-dtype fp8
    python benchmarks/dreamx_world.py --height 480 --width 832 --model-options '{"decoder": "tiny"}'
    python benchmarks/dreamx_world.py --tensor-parallel 2 \\
        --model-options '{"decoder": "tiny", "sequence_parallel": true}'
    # Wan's decoder
    python benchmarks/dreamx_world.py
    # try it without a GPU
    python benchmarks/dreamx_world.py --tiny --height 64 --width 96 --eager --chunks 10

Random weights with the released shapes give the same times as trained weights. Steady-state values
are medians over all chunks after the window is full. Chunks are measured end to end, from the keys
to the colour-corrected uint8 frames. Each chunk is requested while its predecessor is running. The
time to the first frame includes encoding the image. The released model's video plays at 16 frames
per second.
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

VIDEO_FPS = 16.0
TINY_VAE_CHANNELS = (256, 128, 64, 64)


def write_checkpoint(root: Path) -> None:
    """Write a checkpoint directory for the released architecture, to be loaded with --load-format
    dummy. Its only weights are the tiny decoder's, because the decoder's layer widths are read from
    its weight file. The directory also contains a tokenizer.
    """
    from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
    from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer
    from vllm_omni.testing.tiny.wan import write_tiny_vae

    write_t5_tokenizer(root / "google" / "umt5-xxl")
    (root / "config.json").write_text(json.dumps({"model_type": "ti2v", "cam_method": "prope"}))
    write_tiny_vae(root / "taew2_2.pth", 0, TINY_VAE_CHANNELS, WAN_2_2_VAE)


def main() -> None:
    from vllm_omni.model_executor.models.registry import get_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, name="dreamx_world", size=(704, 1280), warm_chunks=8)
    args = parser.parse_args()
    args.variant, args.authors_fps = "5B autoregressive", VIDEO_FPS
    args.prompt, args.actions, args.image_tensors = "a path in a forest", [["w", "l"]] * 3, ()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "world"
        if args.tiny:
            get_family("dreamx_world").make_tiny(model, 0, "original")
        else:
            write_checkpoint(model)
        result = asyncio.run(run(model, args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
