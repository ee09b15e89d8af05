# SPDX-License-Identifier: Apache-2.0
"""Check the training machine in under a minute. The script prints one line per check and raises an
exception at the first failure.

    torchrun --nproc-per-node N -m training.tiny_world.selftest --out DIR [--profile]
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from training.tiny_world.masks import dense_mask, visibility
from training.tiny_world.ranks import Clock, Ranks
from training.tiny_world.train_world import (
    Objective,
    TeacherForcing,
    Trainer,
    add_common_options,
    export,
    read_sizes,
    uncompiled,
)
from training.tiny_world.world_data import noised, write_synthetic_data


def main() -> None:
    parser = argparse.ArgumentParser(description="Check this machine; --out is for its files.")
    parser.add_argument("--profile", action="store_true", help="say where a step's time goes")
    add_common_options(parser)
    options = parser.parse_args()
    ranks, clock = Ranks.join(), Clock(options.minutes)
    sizes = read_sizes(options)
    folder = options.out or Path("/tmp/tiny_world_selftest")
    data = folder / "data"
    if ranks.leads:
        write_synthetic_data(data, sizes, ranks.world, 48, 21)
    ranks.agree([0.0])  # a barrier
    options.data, options.prompts, options.out, options.resume = (
        data,
        data / "prompts.pt",
        folder,
        None,
    )
    options.minutes, options.total_minutes = 60.0, 60.0

    def say(text: str) -> None:
        if ranks.leads:
            print(f"[{clock.elapsed():5.1f} s] {text}", flush=True)

    say(f"torch {torch.__version__} on {ranks.world} x {ranks.device.type}")
    trainer = Trainer(options, "teacher", ranks)
    objective = TeacherForcing(trainer)
    check_mask(trainer, say)
    trainer.train_step(objective)
    say("one step")
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    started, steps = time.monotonic(), 20
    for _ in range(steps):
        trainer.train_step(objective)
    means = trainer.sums.read_means()
    memory = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else 0.0
    say(
        f"{steps / (time.monotonic() - started):.2f} steps/s, loss {means['loss']:.3f}, "
        f"{memory:.1f} GiB"
    )
    if options.profile:
        profile(trainer, objective, say)
    trainer.evaluate()
    say("evaluated")
    trainer.save(objective)
    ranks.agree([0.0])
    again_options = argparse.Namespace(**{**vars(options), "resume": folder})
    again = Trainer(again_options, "teacher", ranks)
    far = max(
        float((a - b).detach().abs().max())
        for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True)
    )
    if not (again.step == trainer.step and far < 5e-3):
        raise RuntimeError(f"resumed at step {again.step} of {trainer.step}, weights off by {far}")
    again.train_step(TeacherForcing(again))
    say(f"resumed and went on (weights rounded by {far:.1e})")
    if ranks.leads:
        export(folder, folder / "transformers", None)
    say("selftest passed")
    ranks.destroy_group()


def profile(
    trainer: Trainer, objective: Objective, say: Callable[[str], None], steps: int = 4
) -> None:
    """Print where a step spends its time: the longest kernels, and the total time of all kernels
    compared with the elapsed time.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if trainer.ranks.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as recorded:
        started = time.monotonic()
        for _ in range(steps):
            trainer.train_step(objective)
        trainer.sums.read_means()
        wall = time.monotonic() - started
    kernels = [event for event in recorded.key_averages() if event.self_cpu_time_total == 0]
    rows = sorted(
        ((event.self_device_time_total, event.count, event.key) for event in kernels), reverse=True
    )
    busy = sum(micros for micros, _, _ in rows) / 1000 / steps
    say(f"profile: {1000 * wall / steps:.1f} ms a step, kernels {busy:.1f} ms")
    for micros, count, name in rows[:24]:
        say(f"  {micros / 1000 / steps:7.3f} ms {count / steps:6.1f} x {name[:100]}")


def check_mask(trainer: Trainer, say: Callable[[str], None]) -> None:
    """Compare the flows and gradients of compiled FlexAttention with those of plain masked
    attention, in the dtype of the matrix products.
    """
    batch = trainer.sampler.draw()
    sigma = trainer.sampler.noise_levels()
    dense = dense_mask(
        torch.stack(
            [
                visibility(batch.latents.shape[1], c, trainer.sizes.window, trainer.sizes.sink)
                for c in (3, 1)
            ]
        )[(trainer.chunk_B == 1).long()],
        trainer.sizes.tokens,
    ).to(trainer.ranks.device)
    with torch.no_grad():  # a newly initialised head returns zeros
        before = trainer.model.head.head.weight.clone()
        trainer.model.head.head.weight.normal_(std=0.05)
        for block in trainer.model._blocks():
            block.cam_scale_layer.weight.normal_(std=0.01)
    results = []
    for mask in (trainer.mask, dense):
        trainer.optimizer.zero_grad()
        with uncompiled() if mask is dense else nullcontext():
            noise = torch.ones_like(batch.latents)
            flow = trainer.model.packed(
                batch.latents, noised(batch.latents, sigma, noise), 1000 * sigma, batch.clips, mask
            )
        flow.square().mean().backward()
        grads = torch.cat(
            [p.grad.flatten() for p in trainer.optimizer.parameters if p.grad is not None]
        )
        results.append((flow.detach(), grads.double()))
    (flow, grad), (flow_dense, grad_dense) = results
    away = float((flow - flow_dense).norm() / flow_dense.norm())
    angle = float(1 - torch.nn.functional.cosine_similarity(grad, grad_dense, dim=0))
    say(
        f"flex against dense attention: flows differ by {away:.1e}, gradients by an angle of "
        f"{angle:.1e} (1 - cos)"
    )
    if not (away < 5e-2 and angle < 1e-2):
        raise RuntimeError("the compiled packed forward is not the plain one")
    with torch.no_grad():
        trainer.model.head.head.weight.copy_(before)
        for block in trainer.model._blocks():
            block.cam_scale_layer.weight.zero_()


if __name__ == "__main__":
    main()
