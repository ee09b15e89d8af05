# SPDX-License-Identifier: Apache-2.0
"""The world in the package is complete and has a description, and users can write it to any
directory.
"""

import logging
import shutil
from pathlib import Path

import pytest
from PIL import Image

import vllm_omni.worlds
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.checkpoints import make_world
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.worlds import village_checkpoint
from vllm_omni.worlds.description import description_file, read_description
from vllm_omni.worlds.manifest import read_manifest

WEIGHTS = (
    "transformers/diffusion_pytorch_model.safetensors",
    "Wan2.1_VAE.pth",
    "taew2_1.safetensors",
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return the directory written by `vllm-omni make-world OUT`."""
    make_world.write_world(tmp_path / "world")
    return tmp_path / "world"


def test_everything_is_there_and_small(village: Path) -> None:
    """The world's manifest lists every other file in its directory, possibly except `README.md`.
    All files together take up at most 25 MB.
    """
    manifest = read_manifest(village)
    assert manifest is not None
    found = {path.relative_to(village).as_posix() for path in village.rglob("*") if path.is_file()}
    assert found - {"README.md"} == {*manifest.files, "manifest.json"} - {"README.md"}
    assert set(WEIGHTS) <= found
    assert sum(path.stat().st_size for path in village.rglob("*") if path.is_file()) <= 25e6


def test_the_description_fits_the_files(village: Path) -> None:
    """Start images have the frame size that the world was trained for, and the tour video has as
    many frames as the tour.
    """
    description = read_description(village)
    assert description is not None
    assert description.domain == "tiny_village"
    assert [prompt.name for prompt in description.prompts] == ["day", "dusk", "snow"]
    assert {Image.open(village / start.file).size for start in description.starts} == set(
        description.sizes
    )
    assert description.tour is not None
    assert description.tour.truth is not None
    frames_THWC, _ = decode_mp4(description_file(village, description.tour.truth).read_bytes())
    assert (frames_THWC.shape[2], frames_THWC.shape[1]) == description.sizes[0]
    assert len(frames_THWC) == 4 * len(description.tour.keys) - 3
    assert len(description.tour.keys) % 3 == 0, "it fills chunks of three latent frames"


def test_make_world_writes_identical_files(
    village: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make-world` writes files identical to those in the package and prints the command that
    serves them.
    """
    written = tmp_path / "world"
    with pytest.raises(SystemExit, match="0"):
        main(["make-world", str(written)])
    for path in village.rglob("*"):
        if path.is_file():
            assert (written / path.relative_to(village)).read_bytes() == path.read_bytes()
    assert f"vllm serve {written} --omni" in capsys.readouterr().out


def test_make_world_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(CommandError, match="is not an empty directory"):
        make_world.write_world(tmp_path)


def test_serving_it_needs_no_option(written: Path) -> None:
    """No options are required to serve the world: the defaults are the frame size used in training,
    the world's own decoder and the focal length that the keys assume.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_omni.config import OmniConfig
    from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

    config = EngineArgs(
        model=str(written), config_format="omni", skip_tokenizer_init=True
    ).create_engine_config()
    omni = OmniConfig.from_additional_config(config.additional_config)
    description = read_description(written)
    assert description is not None
    assert (omni.width, omni.height) == description.sizes[0] == (160, 96)
    assert omni.model == description.model
    info = StreamInfo.from_vllm_config(config, "world")
    assert info.card == description
    serve.check(serve.ServeFlags.scan([str(written), "--port", "0"]))


def test_a_size_it_was_not_trained_for_is_warned_of(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the frame size is one that the world was not trained for, the server starts and logs a
    warning that states the size used in training.
    """
    from vllm.engine.arg_utils import EngineArgs

    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        EngineArgs(
            model=str(written),
            config_format="omni",
            skip_tokenizer_init=True,
            additional_config={"omni": {"height": 96, "width": 192}},
        ).create_engine_config()
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "192x96 was requested, this world was trained at 160x96" in caplog.text


@pytest.mark.parametrize("name", [*WEIGHTS, "transformers/config.json", "world.json"])
def test_a_damaged_copy_is_refused_before_anything_starts(written: Path, name: str) -> None:
    """A damaged copy is refused before any process starts, with a one-line error that names the
    file and the command that rewrites it.
    """
    (written / name).write_bytes((written / name).read_bytes()[:-1])
    with pytest.raises(CommandError, match=r"is damaged .*`vllm-omni make-world DIR`$") as caught:
        serve.check(serve.ServeFlags.scan([str(written), "--port", "0"]))
    assert name in str(caught.value)
    (written / name).unlink()
    with pytest.raises(CommandError, match=r"is missing .*`vllm-omni make-world DIR`$"):
        serve.check(serve.ServeFlags.scan([str(written), "--port", "0"]))


def test_a_damaged_installation_says_so(
    written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the installation itself is damaged, the error says that `make-world` cannot repair it."""
    monkeypatch.setattr(vllm_omni.worlds, "__file__", str(tmp_path / "package" / "__init__.py"))
    with pytest.raises(ValueError, match=r"manifest\.json is missing; install vllm-worlds again"):
        village_checkpoint()
    shutil.copytree(written, tmp_path / "package" / "village")
    assert village_checkpoint() == tmp_path / "package" / "village"
    (tmp_path / "package" / "village" / WEIGHTS[0]).unlink()
    with pytest.raises(CommandError, match=r"is missing .*; install vllm-worlds again"):
        make_world.write_world(tmp_path / "other")
    assert not (tmp_path / "other").exists()
