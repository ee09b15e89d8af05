# SPDX-License-Identifier: Apache-2.0
"""The offline example turns an image and a camera folder into a video."""

from pathlib import Path

import numpy as np
import pytest
from helpers.example_scripts import load_example, run_example
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

SCRIPT = "lingbot_world.py"
EXAMPLE = load_example(SCRIPT)


@pytest.fixture
def camera(tmp_path: Path) -> Path:
    """Return a camera folder whose camera path moves to the right for 21 frames."""
    folder = tmp_path / "walk"
    folder.mkdir()
    poses_N44 = np.tile(np.eye(4, dtype=np.float32), (21, 1, 1))
    poses_N44[:, 0, 3] = 0.02 * np.arange(21)
    np.save(folder / "poses.npy", poses_N44)
    np.save(folder / "intrinsics.npy", np.tile(np.float32([660, 660, 416, 240]), (21, 1)))
    return folder


@pytest.mark.engine
def test_image_and_camera_folder_become_a_video(
    lingbot_world: Path, camera: Path, tmp_path: Path
) -> None:
    """An image and a camera folder yield a video of the requested size that shows motion. The video
    consists of two chunks, which have 9 and 12 frames.
    """
    image = tmp_path / "start.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(image)
    out = tmp_path / "walk.mp4"
    run_example(
        *(SCRIPT, lingbot_world, "--image", image, "--camera", camera, "--out", out),
        *("--height", 32, "--width", 48),
    )
    frames_THWC, _ = decode_mp4(out.read_bytes())
    assert frames_THWC.shape == (21, 32, 48, 3)
    assert not (frames_THWC == frames_THWC[0]).all()


@pytest.mark.parametrize(("num_poses", "sizes"), [(9, [9]), (21, [9, 12]), (33, [9, 12, 12])])
def test_a_path_is_cut_into_whole_chunks(num_poses: int, sizes: list[int]) -> None:
    """A camera path is truncated to whole chunks. The first chunk is shorter than the others."""
    assert EXAMPLE.chunk_sizes(StreamInfo(), num_poses) == sizes


@pytest.mark.parametrize("num_poses", [0, 8, 15])
def test_a_path_that_fills_no_chunk_is_refused(num_poses: int) -> None:
    """A path that is too short for one chunk is rejected, and the error states the number of poses
    per chunk.
    """
    with pytest.raises(
        SystemExit,
        match=f"{num_poses} poses do not fill whole chunks: the first chunk takes 9, later ones 12",
    ):
        EXAMPLE.chunk_sizes(StreamInfo(), num_poses)


def test_frames_become_numbered_images(tmp_path: Path) -> None:
    """`--out walk.png` writes lossless, numbered images in order, and no other files."""
    frames_THWC = np.random.default_rng(0).integers(0, 256, (3, 16, 32, 3), np.uint8)
    EXAMPLE.write_frames(tmp_path / "walk.png", frames_THWC, 16.0)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["walk-0000.png", "walk-0001.png", "walk-0002.png"]
    assert (np.stack([np.asarray(Image.open(file)) for file in files]) == frames_THWC).all()


def test_frames_become_an_array(tmp_path: Path) -> None:
    """`--out walk.npy` writes the exact frames as an array."""
    frames_THWC = np.random.default_rng(0).integers(0, 256, (3, 16, 32, 3), np.uint8)
    EXAMPLE.write_frames(tmp_path / "walk.npy", frames_THWC, 16.0)
    assert (np.load(tmp_path / "walk.npy") == frames_THWC).all()


@pytest.mark.parametrize(
    ("out", "latents", "complaint"),
    [
        ("walk.gif", False, "must end in .mp4 or .png or .npy, got"),
        ("walk.mp4", True, "must end in .npy with --latents, got"),
        ("nowhere/walk.mp4", False, "there is no folder"),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_at_once(
    tmp_path: Path, out: str, latents: bool, complaint: str
) -> None:
    """If the output file cannot be written, the script fails before it generates the video."""
    with pytest.raises(SystemExit, match=complaint):
        EXAMPLE.check_out(tmp_path / out, latents)


@pytest.mark.nightly
def test_latents_are_written_as_one_array(lingbot_world: Path, tmp_path: Path) -> None:
    """The script writes the latents of two chunks as one array. Each chunk has three latent frames,
    and the latents have an eighth of the video's height and width.
    """
    out = tmp_path / "latents.npy"
    run_example(
        SCRIPT,
        lingbot_world,
        "--chunks",
        2,
        "--out",
        out,
        "--latents",
        "--height",
        32,
        "--width",
        48,
    )
    latents = np.load(out)
    assert (latents.shape, latents.dtype) == ((16, 6, 4, 6), np.float32)
    assert np.isfinite(latents).all()
    assert latents.std() > 0.1


def test_keys_become_chunks_and_the_last_is_held() -> None:
    """Keys are grouped into chunks of three latent frames, and the last key is held until its chunk
    ends. Seven latent frames therefore require three chunks.
    """
    assert EXAMPLE.parse_keys("w*3 wl -") == [["w"], ["w"], ["w"], ["w", "l"], []]
    cut = [
        actions
        for actions, camera in EXAMPLE.walk(StreamInfo(), [["w"]] * 6 + [["l"]])
        if camera is None
    ]
    assert cut == [[["w"]] * 3, [["w"]] * 3, [["l"]] * 3]


@pytest.mark.nightly
def test_keys_become_a_video(lingbot_world: Path, tmp_path: Path) -> None:
    out = tmp_path / "keys.npy"
    run_example(
        SCRIPT,
        lingbot_world,
        "--keys",
        "w*3 wl*3",
        "--out",
        out,
        "--height",
        32,
        "--width",
        48,
        "--enforce-eager",
    )
    assert np.load(out).shape == (21, 32, 48, 3)


def test_misspelt_keys_are_refused_with_the_allowed_ones(lingbot_world: Path) -> None:
    """Misspelt keys are rejected before the model is loaded, and the error lists the allowed
    keys.
    """
    with pytest.raises(SystemExit, match="w a s d i j k l"):
        EXAMPLE.main(EXAMPLE.make_parser().parse_args([str(lingbot_world), "--keys", "w*3 x"]))
