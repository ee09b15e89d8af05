# SPDX-License-Identifier: Apache-2.0
"""Train a small policy, on a CPU and over HTTP, to walk to a landmark of the demo world by sight.

    vllm-omni demo --no-browser                                     # in another terminal, or:
    python examples/online_serving/train_policy.py                  # starts a server of its own
    python examples/online_serving/train_policy.py --url http://127.0.0.1:8000

The observations are latents, so the server need not decode them. The policy is linear and maps
pooled latents to the probabilities of four keys. A step's reward is the decrease in the distance to
the landmark, in metres, computed from `infos["world_poses"]`. The policy is trained with REINFORCE,
with the mean return as the baseline, and is then compared in new episodes with an untrained policy,
which presses random keys. The script needs gymnasium but no GPU.
"""

import argparse
import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vllm_omni.entrypoints.cli import demo
from vllm_omni.environments.world import WorldVectorEnv
from vllm_omni.worlds import village_checkpoint

KEYS = ("w", "s", "j", "l")
"""Keys that the policy can press: forward, back, turn left, turn right."""
START, LANDMARK = "start/square_day.png", (2.6, 7.4)
"""Start image, and (x_m, z_m) of the landmark, which is the street about 11 m ahead."""
POOLS = (2, 4)
"""Numbers of rows and columns that latents are pooled into."""


class Policy:
    """Linear policy that maps features to the probabilities of keys."""

    def __init__(self, num_features: int, seed: int) -> None:
        self.weights = np.zeros((num_features, len(KEYS)))
        self._random = np.random.default_rng(seed)

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return the probabilities [N, keys] for features [N, features]."""
        scores = features @ self.weights
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def choose(self, features: np.ndarray) -> np.ndarray:
        """Sample a key for each row of features."""
        chances = self.probabilities(features).cumsum(axis=1)
        return (self._random.random((len(features), 1)) > chances).sum(axis=1).clip(0, 3)

    def learn(
        self, features: np.ndarray, keys: np.ndarray, returns: np.ndarray, rate: float
    ) -> None:
        """Take one REINFORCE step at the learning rate `rate`. All arrays have the shape
        [T, N, ...].
        """
        advantages = returns - returns.mean(axis=1, keepdims=True)
        advantages /= advantages.std() + 1e-6
        for step in range(len(features)):
            wanted = np.eye(len(KEYS))[keys[step]] - self.probabilities(features[step])
            self.weights += rate * features[step].T @ (wanted * advantages[step, :, None])


def features_of(latents: np.ndarray) -> np.ndarray:
    """Return the features [N, features] of latents [N, C, F, h, w]: the pooled last frame and a
    constant.
    """
    last = latents[:, :, -1]
    count, channels, height, width = last.shape
    rows, columns = POOLS
    cut = last[:, :, : height // rows * rows, : width // columns * columns]
    pooled = cut.reshape(count, channels, rows, height // rows, columns, width // columns)
    flat = pooled.mean(axis=(3, 5)).reshape(count, -1)
    return np.concatenate([flat / np.sqrt(flat.shape[1]), np.ones((count, 1))], axis=1)


def distances(infos: dict[str, Any]) -> np.ndarray:
    return np.hypot(*(infos["world_poses"][:, -1, axis] - LANDMARK[axis] for axis in (0, 1)))


def play(
    env: WorldVectorEnv, policy: Policy, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Play one episode in all environments.

    Returns:
        Features [T, N, features], keys [T, N] and rewards in metres [T, N].
    """
    latents, infos = env.reset(seed=seed)
    names = env.model_actions.button_names
    seen, taken, rewards = [], [], []
    for _ in range(steps):
        features, before = features_of(latents), distances(infos)
        keys = policy.choose(features)
        held = np.array([[name == KEYS[key] for name in names] for key in keys], np.int8)
        latents, _, _, _, infos = env.step({"buttons": held})
        seen.append(features)
        taken.append(keys)
        rewards.append(before - distances(infos))
    return np.array(seen), np.array(taken), np.array(rewards)


@contextlib.contextmanager
def server_of(args: argparse.Namespace) -> Iterator[str]:
    """Yield the server address. If no address is given, start a server."""
    if args.url is not None:
        yield args.url
        return
    omni = {"height": 96, "width": 160, "max_sessions": args.envs, "batch_invariant": False}
    omni["max_requests_per_step"] = args.envs
    flags = ["--additional-config", json.dumps({"omni": omni}), "--max-num-seqs", str(args.envs)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with demo.server(village_checkpoint(), port, 96, 160, log, extra=flags) as process:
            demo.wait_until_healthy(process, 600)
            yield f"http://127.0.0.1:{port}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a policy in the demo world over HTTP.")
    parser.add_argument("--url", help="server of the demo world (default: start one)")
    parser.add_argument("--api-key", help="API key of the server")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="chunks of an episode")
    parser.add_argument("--iterations", type=int, default=12, help="episodes of each environment")
    parser.add_argument("--rate", type=float, default=0.3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="file for the numbers, JSON")
    return parser


def train(env: WorldVectorEnv, args: argparse.Namespace) -> dict[str, Any]:
    """Train a policy, and return how many metres closer to the landmark the trained and an
    untrained policy each get in an episode.
    """
    size = features_of(env.reset(seed=args.seed)[0]).shape[1]
    policy, untrained = Policy(size, args.seed), Policy(size, args.seed + 1)
    began_s, curve = time.perf_counter(), []
    for iteration in range(args.iterations):
        features, keys, rewards = play(env, policy, args.steps, args.seed + 100 * iteration)
        returns = rewards[::-1].cumsum(axis=0)[::-1]
        policy.learn(features, keys, returns, args.rate)
        curve.append(round(float(rewards.sum(axis=0).mean()), 3))
        print(f"iteration {iteration}: {curve[-1]:.2f} m closer", flush=True)
    took_s = time.perf_counter() - began_s
    closer = {
        name: play(env, each, args.steps, args.seed + 10_000)[2].sum(axis=0)
        for name, each in (("random", untrained), ("trained", policy))
    }
    return {
        "envs": args.envs,
        "steps": args.steps,
        "iterations": args.iterations,
        "seed": args.seed,
        "training_s": round(took_s, 1),
        "environment_steps_per_s": round(args.envs * args.steps * args.iterations / took_s, 2),
        "metres_closer_by_iteration": curve,
        "metres_closer": {
            name: {
                "mean": round(float(each.mean()), 3),
                "min": round(float(each.min()), 3),
                "max": round(float(each.max()), 3),
            }
            for name, each in closer.items()
        },
    }


def main(args: argparse.Namespace) -> dict[str, Any]:
    image = np.asarray(Image.open(village_checkpoint() / START).convert("RGB"))
    with server_of(args) as url:
        env = WorldVectorEnv.connect(
            url,
            args.envs,
            api_key=args.api_key,
            prompt="the village on a sunny day",
            image=image,
            observation="latents",
        )
        result = train(env, args)
        env.close()
    print(json.dumps(result, indent=2))
    if args.result is not None:
        args.result.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main(make_parser().parse_args())
