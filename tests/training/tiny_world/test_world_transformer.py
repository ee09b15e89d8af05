# SPDX-License-Identifier: Apache-2.0
"""The trained `WorldTransformer` produces the same flow as the served `LingBotTransformer`, which
runs chunk by chunk.
"""

import itertools
from pathlib import Path

import pytest
import torch

from training.tiny_world.clip_window import ChunkRun, ClipWindow, roll_out
from training.tiny_world.masks import block_mask, dense_mask, visibility
from training.tiny_world.render import FOCAL
from training.tiny_world.transformer import (
    Clips,
    Sizes,
    WorldTransformer,
    camera_basis,
    patchify,
)
from training.tiny_world.village import PERIOD
from training.tiny_world.walks import poses_of
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.lingbot_world.camera import (
    CameraTail,
    camera_map,
    integrate_actions,
    relative_poses,
)
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions, LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.transformer import CameraItem, LingBotTransformer
from vllm_omni.model_executor.models.lingbot_world.weights import load_transformer
from vllm_omni.model_executor.models.lingbot_world.world_pose import frame_features, world_features

FRAMES = 21
SIZES = Sizes(
    dim=48,
    layers=2,
    heads=2,
    ffn=64,
    freq_dim=16,
    text_dim=8,
    text_len=6,
    grid=(4, 6),
    window=12,
    sink=3,
    focals=(31.0, 500.0),
)


@pytest.fixture(scope="module")
def network() -> WorldTransformer:
    """Return a network whose parameters are all random, so that every parameter has an effect."""
    torch.manual_seed(0)
    model = WorldTransformer(SIZES).requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.ndim < 2 or "modulation" in name:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * (0.4 if ".cam_" in name else 1.0) / parameter[0].numel() ** 0.5)
    # A checkpoint stores weights in fp16.
    for parameter in model.parameters():
        parameter.copy_(parameter.half().float())
    return model


@pytest.fixture(scope="module")
def served(
    network: WorldTransformer, tmp_path_factory: pytest.TempPathFactory
) -> LingBotTransformer:
    """Return the serving package's network, loaded from the exported folder by the strict
    loader.
    """
    folder = Path(tmp_path_factory.mktemp("world")) / "transformers"
    network.export(folder)
    config = LingBotWorldConfig.from_checkpoint(SIZES.config_json())
    model = LingBotTransformer(config)
    load_transformer(model, folder, config)
    return model


def _motion(batch: int) -> torch.Tensor:
    keys = ["w", "wl", "l", "", "a", "dj", "i", "ik", "sk", "wj"]
    rows = []
    for clip in range(batch):
        held = [keys[(3 * clip + frame) % len(keys)] for frame in range(FRAMES)]
        poses, _ = integrate_actions(held, CameraTail.origin(), move=1.0)
        rows.append(relative_poses(poses, torch.eye(4, dtype=torch.float64))[:, :3].float())
    return torch.stack(rows)


def _clips(batch: int, *, far: int = 0, switch_at: int = FRAMES) -> Clips:
    frames = torch.arange(FRAMES)
    generator = torch.Generator().manual_seed(1)
    condition = torch.randn(batch, FRAMES, 20, *SIZES.grid, generator=generator)
    text = torch.randn(batch, 2, SIZES.text_len, SIZES.text_dim, generator=generator)
    positions = frames + far * (frames >= SIZES.sink)
    return Clips(
        condition=condition,
        motion=_motion(batch),
        focal=torch.arange(batch) % 2,
        text=text,
        switched=(frames >= switch_at).expand(batch, -1),
        positions=positions.expand(batch, -1),
        **_world(batch),
    )


def _world(batch: int) -> dict[str, torch.Tensor]:
    """Return the clips' world poses. The last clip's poses are unknown."""
    poses = _world_poses(batch)
    known = torch.ones(batch, 1, 1)
    known[-1] = 0
    position = (
        torch.stack([frame_features(clip[:, 0:3:2, 3], PERIOD) for clip in poses]).float() * known
    )
    return {"rotation": poses[..., :3, :3].float() * known.unsqueeze(-1), "place": position}


def _world_poses(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    positions = 40 * torch.randn(batch, FRAMES, 2, generator=generator)
    yaw, pitch = torch.randn(2, batch, FRAMES, generator=generator)
    return poses_of(positions, yaw, 0.3 * pitch)


def _features(clips: Clips, clip: int, own: slice) -> torch.Tensor:
    height, width = 8 * SIZES.grid[0], 8 * SIZES.grid[1]
    focal = torch.tensor(
        [[FOCAL * width, FOCAL * width, width / 2, height / 2]], dtype=torch.float64
    )
    known = bool(clips.place[clip, 0, -1])
    poses = _world_poses(len(clips.focal))[clip, own] if known else None
    count = own.stop - own.start
    return world_features(poses, focal.expand(count, 4), height, width, PERIOD)


def _rope(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tables = [
        rope_tables(SIZES.head_dim, range(p, p + 1), SIZES.grid[0] // 2, SIZES.grid[1] // 2)
        for p in positions
    ]
    return torch.cat([cos for cos, _ in tables]), torch.cat([sin for _, sin in tables])


def _serve(model, clips, clip, clean, noisy, timesteps, chunk) -> torch.Tensor:
    """Run the package's network on one clip. For each chunk, the noisy pass is followed by the
    clean-context pass.
    """
    height, width = 8 * SIZES.grid[0], 8 * SIZES.grid[1]
    window = KVWindow(
        num_layers=SIZES.layers,
        window_frames=SIZES.window,
        sink_frames=SIZES.sink,
        tokens_per_frame=SIZES.tokens,
        num_heads=SIZES.heads,
        head_dim=SIZES.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    flows = []
    for start in range(0, FRAMES, chunk):
        own, frames = slice(start, start + chunk), range(start, start + chunk)
        pose = torch.eye(4).repeat(chunk, 1, 1)
        pose[:, :3] = clips.motion[clip, own]
        focal = SIZES.focals[int(clips.focal[clip])]
        intrinsics = torch.tensor([focal, focal, width / 2, height / 2]).expand(chunk, 4)
        common = {
            "condition": clips.condition[clip, own].transpose(0, 1),
            "frames": frames,
            "rope": _rope(clips.positions[clip, own].tolist()),
            "camera": model.camera_modulation(
                camera_map(pose, intrinsics, height, width), _features(clips, clip, own)
            ),
            "cross_kv": model.cross_attention_kv(
                clips.text[clip, int(clips.switched[clip, start])]
            ),
            "window": window,
        }
        for latents, timestep in ((noisy, float(timesteps[clip, start])), (clean, 0.0)):
            row = CameraItem(
                latents=latents[clip, own].transpose(0, 1), timestep=timestep, **common
            )
            flow = model([row])[0].transpose(0, 1)
            if latents is noisy:
                flows.append(flow)
        window.commit(start + chunk)
    return torch.cat(flows)


def _inputs(batch: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    clean, noisy = torch.randn(2, batch, FRAMES, 16, *SIZES.grid, generator=generator)
    timesteps = 1000 * torch.rand(batch, FRAMES // chunk, generator=generator).repeat_interleave(
        chunk, 1
    )
    return clean, noisy, timesteps


@torch.no_grad()
@pytest.mark.parametrize("chunk", [3, 1])
@pytest.mark.parametrize("far", [0, 1200])
def test_a_packed_clip_equals_the_served_network_chunk_by_chunk(
    network, served, chunk, far
) -> None:
    """When a whole clip is processed in a single pass, each chunk's flow equals the served
    network's flow within 1e-5 in fp32.

    The clips exercise the window, sink frames, a camera with two different focal lengths, and
    prompt changes.
    """
    clips = _clips(2, far=far, switch_at=9)
    clean, noisy, timesteps = _inputs(2, chunk)
    mask = dense_mask(
        visibility(FRAMES, chunk, SIZES.window, SIZES.sink).unsqueeze(0), SIZES.tokens
    )
    flows = network.packed(clean, noisy, timesteps, clips, mask)
    assert flows.abs().max() > 0.5
    for clip in range(2):
        expected = _serve(served, clips, clip, clean, noisy, timesteps, chunk)
        torch.testing.assert_close(flows[clip], expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [3, 1])
def test_clips_made_chunk_by_chunk_see_what_packed_ones_see(network, chunk) -> None:
    clips = _clips(2, switch_at=9)
    clean, noisy, timesteps = _inputs(2, chunk)
    mask = dense_mask(
        visibility(FRAMES, chunk, SIZES.window, SIZES.sink).unsqueeze(0), SIZES.tokens
    )
    expected = network.packed(clean, noisy, timesteps, clips, mask)
    window, flows = ClipWindow(network, 2, chunk), []
    for start in range(0, FRAMES, chunk):
        run, own = ChunkRun(window, clips, start), slice(start, start + chunk)
        flows.append(run.predict(noisy[:, own], timesteps[:, own]))
        run.predict(clean[:, own], torch.zeros(2, chunk), write=True)
    torch.testing.assert_close(torch.cat(flows, 1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("chunk", "window", "sink"), [(3, 18, 3), (1, 18, 3), (3, 12, 6), (1, 6, 0)]
)
def test_frames_see_what_the_kv_window_shows(chunk, window, sink) -> None:
    retained = KVWindow(
        num_layers=1,
        window_frames=window,
        sink_frames=sink,
        tokens_per_frame=1,
        num_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device="cpu",
    )
    seen = visibility(30, chunk, window, sink)
    for frame in range(30):
        start = frame // chunk * chunk
        shown = retained.visible_frames(start + chunk)
        assert seen[frame, :30].nonzero().flatten().tolist() == shown
        assert seen[30 + frame, :30].nonzero().flatten().tolist() == [
            other for other in shown if other < start
        ]
        assert (seen[30 + frame, 30:].nonzero().flatten() - start).tolist() == list(range(chunk))
        assert not seen[frame, 30:].any()


@pytest.mark.parametrize(("window", "sink"), [(5, 1), (6, 0), (4, 1), (18, 3)])
def test_flex_attentions_mask_is_the_dense_one(window, sink) -> None:
    """Flex attention's block mask selects the same positions as the dense mask, even if one batch
    contains both chunk lengths.
    """
    seen = torch.stack([visibility(6, chunk, window, sink) for chunk in (3, 1)])
    modes = torch.tensor([0, 1, 1])
    sparse = block_mask(seen, modes, 30)
    dense = dense_mask(seen[modes], 30)
    length = dense.shape[-1]
    index = torch.arange(length)
    for clip in range(3):
        shown = sparse.mask_mod(
            torch.tensor(clip), torch.tensor(0), index.unsqueeze(1), index.unsqueeze(0)
        )
        assert torch.equal(shown, dense[clip, 0])
    blocks = torch.nn.functional.pad(dense, (0, 384 - length, 0, 384 - length)).unflatten(
        -1, (3, 128)
    )
    some = blocks.unflatten(2, (3, 128)).any(-1).any(3)
    assert torch.equal(sparse.to_dense().bool(), some)


@pytest.mark.parametrize("focal", SIZES.focals)
def test_the_camera_map_is_its_basis_times_twelve_numbers(focal) -> None:
    """The camera map is the product of a fixed basis and twelve numbers per frame.

    For poses derived from keys, the product equals the package's camera map within 1e-6 in fp32.
    """
    motion = _motion(1)[0]
    pose = torch.eye(4, dtype=torch.float64).repeat(FRAMES, 1, 1)
    pose[:, :3] = motion
    height, width = 8 * SIZES.grid[0], 8 * SIZES.grid[1]
    intrinsics = torch.tensor([focal, focal, width / 2, height / 2], dtype=torch.float64).expand(
        FRAMES, 4
    )
    expected = patchify(camera_map(pose, intrinsics, height, width).transpose(0, 1).unsqueeze(0))[0]
    numbers = torch.cat((motion[..., 3], motion[..., :3].flatten(1)), dim=1)
    made = torch.einsum("fj,pjc->fpc", numbers, camera_basis(focal, SIZES.grid))
    torch.testing.assert_close(made, expected, atol=1e-6, rtol=0)


def test_the_package_accepts_the_exported_config() -> None:
    sizes = Sizes()
    config = LingBotWorldConfig.from_checkpoint(sizes.config_json())
    assert (config.window_frames, config.sink_frames, config.frames_per_chunk) == (18, 3, 3)
    assert (config.dim, config.num_heads, config.num_layers, config.ffn_dim) == (256, 4, 6, 1024)
    parameters = sum(p.numel() for p in WorldTransformer(sizes).parameters())
    assert 2 * parameters < 19.6e6  # fp16; VAE and tiny decoder: 5.4 of 25 MB


@torch.no_grad()
def test_a_roll_out_is_the_packages_sampler(network, served) -> None:
    """A training rollout produces the same latents as the package's sampler with the same noise.

    As in the pipeline's loop, each chunk runs four steps with fresh noise between them, followed by
    a pass at timestep 0.
    """
    sigmas = LingBotOptions.parse({}, "v2").denoise_schedule().sigmas_x0
    clips = _clips(1)
    given = torch.zeros(1, FRAMES, 16, *SIZES.grid)
    made, inputs = roll_out(
        network, clips, given, torch.zeros(1), 3, sigmas, torch.Generator().manual_seed(5)
    )
    for step, sigma in enumerate(sigmas):
        mask = dense_mask(
            visibility(FRAMES, 3, SIZES.window, SIZES.sink).unsqueeze(0), SIZES.tokens
        )
        flow = network.packed(
            made, inputs[step], torch.full((1, FRAMES), 1000 * sigma), clips, mask
        )
        x0 = inputs[step] - sigma * flow
        if step + 1 < len(sigmas):
            noise = (inputs[step + 1] - (1 - sigmas[step + 1]) * x0) / sigmas[step + 1]
            assert abs(float(noise.std()) - 1) < 0.05 and abs(float(noise.mean())) < 0.05
    torch.testing.assert_close(x0, made, atol=1e-3, rtol=0)
    assert len({float(x) for (x,) in itertools.islice(inputs[0].reshape(-1, 1), 50)}) == 50
