# SPDX-License-Identifier: Apache-2.0
"""Step eight worlds with random actions, as gymnasium environments, then fork one of them and
replay it.

    vllm-omni make-world my_world
    python examples/offline_inference/world_env.py my_world \\
        --image my_world/start/street_day.png --envs 8

The script needs gymnasium (`pip install ".[env]"` in the checkout). It prints the chunks and frames
per second, summed over all environments.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vllm_omni.environments.world import WorldVectorEnv
from vllm_omni.multimodal import rgb_image


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Worlds as a gymnasium VectorEnv, offline.")
    parser.add_argument("model", type=Path, help="checkpoint directory of a world")
    parser.add_argument("--image", type=Path, help="start image (default: grey)")
    parser.add_argument("--prompt", default="the village on a clear day")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=5, help="chunks of each environment (default: 5)"
    )
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="one forward pass for all environments; results then differ in the last bits",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    grey = np.full((args.height, args.width, 3), 128, np.uint8)
    image = grey if args.image is None else np.asarray(rgb_image(Image.open(args.image)))
    env = WorldVectorEnv.load(
        args.model,
        args.envs,
        exact=not args.fast,
        prompt=args.prompt,
        image=image,
        height=args.height,
        width=args.width,
    )
    print(f"observations {env.single_observation_space}, actions {env.single_action_space}")
    frames, infos = env.reset(seed=args.seed)
    env.action_space.seed(args.seed)
    started_s = time.perf_counter()
    for _ in range(args.steps):
        frames, _, _, _, infos = env.step(env.action_space.sample())
    took_s = time.perf_counter() - started_s
    chunks = args.envs * args.steps
    print(
        f"{args.envs} environments, {args.steps} steps: {chunks / took_s:.2f} chunks and "
        f"{chunks * frames.shape[1] / took_s:.1f} frames per second; latents "
        f"{list(infos['latents'].shape)}"
    )

    episode, last = env.episodes[0], frames[0].copy()
    assert episode is not None
    if args.envs > 1:
        env.fork(0, [1])
        print("environment 1 is now a copy of environment 0")
    again = env.replay(args.envs - 1, episode)
    same = "equal" if np.array_equal(again[-len(last) :], last) else "different"
    print(f"replayed: {len(again)} frames, the last chunk is {same}")
    env.close()


if __name__ == "__main__":
    main(make_parser().parse_args())
