# SPDX-License-Identifier: Apache-2.0
"""Values in a checkpoint's `world.json` become option values. Invalid values are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vllm_omni.worlds.description import WorldDescription, read_description, with_defaults

CARD: dict[str, Any] = {
    "domain": "toy",
    "title": "A toy",
    "about": "Toys only.",
    "sizes": [[80, 48], [160, 96]],
    "metres_per_unit": 10,
    "prompts": [{"name": "day", "text": "by day"}, {"name": "snow", "text": "in the snow"}],
    "starts": [
        {
            "name": "hill",
            "prompt": "day",
            "file": "start/hill.png",
            "x_m": 1,
            "z_m": -2,
            "heading_degrees": 90,
        },
    ],
    "map": {"file": "map.png", "side_m": 30},
    "tour": {
        "start": "start/hill.png",
        "seed": 1,
        "keys": ["", "w", "wl"],
        "prompts": [[0, "day"], [2, "snow"]],
    },
    "model": {"decoder": "tiny"},
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "start").mkdir(exist_ok=True)
    for name in ("start/hill.png", "map.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    (folder / "world.json").write_text(json.dumps({**CARD, **changes}))
    return folder


def description(tmp_path: Path) -> WorldDescription:
    found = read_description(write(tmp_path))
    assert found is not None
    return found


def test_a_directory_without_a_description_has_none(tmp_path: Path) -> None:
    """A directory without a world description is accepted, because most checkpoints have none."""
    assert read_description(tmp_path) is None
    assert with_defaults({"omni": {"width": 64}}, None) == {"omni": {"width": 64}}
    assert with_defaults(None, None) == {}


def test_a_world_description_overrides_the_default_size_of_the_model(tmp_path: Path) -> None:
    """The frame size in the world description overrides the model's default, and a size set by the
    user overrides both.
    """
    assert with_defaults(None, None, (32, 48)) == {"omni": {"height": 32, "width": 48}}
    assert with_defaults({"omni": {"width": 64}}, None, (32, 48)) == {"omni": {"width": 64}}
    assert with_defaults({}, description(tmp_path), (32, 64))["omni"]["width"] == 80


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"height": 48, "width": 80, "model": {"decoder": "tiny"}}),
        (
            {"max_sessions": 2},
            {"height": 48, "width": 80, "max_sessions": 2, "model": {"decoder": "tiny"}},
        ),
        ({"height": 96, "width": 160}, {"height": 96, "width": 160, "model": {"decoder": "tiny"}}),
        ({"width": 96}, {"width": 96, "model": {"decoder": "tiny"}}),
        (
            {"model": {"decoder": "wan", "shift": 3}},
            {"height": 48, "width": 80, "model": {"decoder": "wan", "shift": 3}},
        ),
    ],
)
def test_the_description_fills_in_what_the_user_left_open(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The description sets the frame size and model options that the user has not set. It leaves
    other keys unchanged.
    """
    assert with_defaults({"omni": given, "other": 1}, description(tmp_path)) == {
        "omni": expected,
        "other": 1,
    }


def test_a_size_it_was_not_trained_for_is_named(tmp_path: Path) -> None:
    """If the world was not trained for the frame size, a warning lists the sizes that it was
    trained for.
    """
    found = description(tmp_path)
    assert found.untrained_size(160, 96) is None
    text = found.untrained_size(96, 160)
    assert text is not None
    assert "96x160 was requested" in text
    assert "trained at 80x48 or 160x96" in text


def test_clients_receive_the_description_without_tour_and_model_options(tmp_path: Path) -> None:
    """Clients receive the world description without the tour, the model options and the domain."""
    reported = description(tmp_path).as_hello()
    assert reported["prompts"][1] == {"name": "snow", "text": "in the snow"}
    assert reported["sizes"] == ((80, 48), (160, 96)) or reported["sizes"] == [[80, 48], [160, 96]]
    assert not {"tour", "model", "domain"} & reported.keys()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"domain": "Two Words"}, r"\$\.domain"),
        ({"sizes": []}, r"\$\.sizes"),
        ({"sizes": [[80, 8]]}, r"\$\.sizes"),
        ({"surprise": 1}, "surprise"),
        ({"prompts": []}, "no prompt is named 'day'; available: none"),
        ({"starts": []}, r"tour\.start must be the file of one of `starts`"),
        ({"starts": [{**CARD["starts"][0], "file": "../../etc/a.png"}]}, r"\$\.starts\[0\]\.file"),
        ({"starts": [{**CARD["starts"][0], "file": "start/a.svg"}]}, r"\$\.starts\[0\]\.file"),
        ({"map": {"file": "/map.png", "side_m": 30}}, r"\$\.map\.file"),
        ({"map": {"file": "gone.png", "side_m": 30}}, r"gone\.png is not there"),
        (
            {"tour": {**CARD["tour"], "prompts": [[1, "day"]]}},
            r"tour\.prompts must start at latent frame 0",
        ),
        (
            {"tour": {**CARD["tour"], "prompts": [[0, "dusk"]]}},
            "no prompt is named 'dusk'; available: day, snow",
        ),
    ],
)
def test_invalid_descriptions_are_rejected(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    """An invalid description is refused with a one-line error that names the faulty field, value or
    file. Files outside the checkpoint directory are also refused.
    """
    with pytest.raises(ValueError, match=complaint) as caught:
        read_description(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A symbolic link to a target outside the checkpoint is refused, because a served image must be
    inside the checkpoint.
    """
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    (tmp_path / "world").mkdir()
    folder = write(tmp_path / "world")
    (folder / "map.png").unlink()
    (folder / "map.png").symlink_to(secret)
    with pytest.raises(ValueError, match="link to a file outside"):
        read_description(folder)


def test_garbage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "world.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match=r"world\.json cannot be read"):
        read_description(tmp_path)
