# SPDX-License-Identifier: Apache-2.0
"""`world.json` of a checkpoint directory: a world's training sizes, and the prompts and pictures offered to visitors.

Any model's checkpoint may have one. The config parser carries it to the doors (`CONFIG_KEY`), its sizes and model
options are the defaults of `vllm serve`, its pictures are served beside the web page. Knows no model and no socket.
Held by tests/worlds/test_card.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from vllm_omni.model_executor.tensor_files import confined

CARD: Final = "world.json"
CONFIG_KEY: Final = "omni_world"
"""Where vLLM's config object holds the card, as plain values."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Picture = Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9_]+/)?[a-z0-9_]+\.(png|jpg)\Z")]
Video = Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9_]+/)?[a-z0-9_]+\.mp4\Z")]
Side = Annotated[int, msgspec.Meta(ge=16, le=4096)]


class WorldPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that is offered as a button. name: the button's text."""

    name: Name
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class StartPicture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A picture to begin with. prompt: the name of the one that fits it. x_m, z_m: where on the map it was taken, in
    metres to the east and north; heading_degrees: where it looks, from north to the east; pitch_degrees: upwards.
    """

    name: Name
    prompt: Name
    file: Picture
    x_m: float
    z_m: float
    heading_degrees: float
    pitch_degrees: float = 0.0


class WorldMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ground from above, north up, (0, 0) in the middle. side_m: metres of the picture's side, after which the
    world repeats.
    """

    file: Picture
    side_m: Annotated[float, msgspec.Meta(gt=0)]


class WorldGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The world's occupancy grid (`grid.OccupancyGrid`). side_m: metres of its side, after which the world repeats."""

    file: Picture
    side_m: Annotated[float, msgspec.Meta(gt=0)]


class Tour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A walk to show. start: the file of a start picture. keys: held in each latent frame. prompts: by the latent frame
    from which they hold; the first is 0. truth: the same walk as it should look, one frame for each of the model's.
    """

    start: Picture
    seed: int
    keys: list[Annotated[str, msgspec.Meta(pattern=r"^[a-z]*\Z")]]
    prompts: list[tuple[int, Name]]
    truth: Video | None = None


class WorldCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a world.

    domain: its name for programs. title: its name for people. about: its contents, and its response to pictures from
    elsewhere. sizes: (width, height) it was trained at, the default first. metres_per_unit: length of a unit of
    camera translation. focal: the camera's focal length over the image's width; None = the model's own. grid: what
    stops a walker; None = nothing does. model: defaults of `omni.model`.
    """

    domain: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,64}\Z")]
    title: Name
    about: Annotated[str, msgspec.Meta(max_length=1000)]
    sizes: Annotated[tuple[tuple[Side, Side], ...], msgspec.Meta(min_length=1)]
    metres_per_unit: Annotated[float, msgspec.Meta(gt=0)]
    prompts: tuple[WorldPrompt, ...] = ()
    starts: tuple[StartPicture, ...] = ()
    focal: Annotated[float, msgspec.Meta(gt=0)] | None = None
    map: WorldMap | None = None
    grid: WorldGrid | None = None
    tour: Tour | None = None
    model: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [prompt.name for prompt in self.prompts]
        wanted = [start.prompt for start in self.starts]
        if self.tour is not None:
            wanted += [name for _, name in self.tour.prompts]
            if self.tour.start not in [start.file for start in self.starts]:
                raise ValueError(f"tour.start must be the file of one of `starts`, got {self.tour.start!r}")
            if not self.tour.prompts or self.tour.prompts[0][0] != 0:
                raise ValueError("tour.prompts must begin at latent frame 0")
        if unknown := [name for name in wanted if name not in names]:
            raise ValueError(f"no prompt is named {unknown[0]!r}; there are: {', '.join(names) or 'none'}")

    @property
    def pictures(self) -> list[str]:
        """Files that the web page shows."""
        return [*(start.file for start in self.starts), *([self.map.file] if self.map is not None else [])]

    def prompt(self, name: str) -> str:
        return next(prompt.text for prompt in self.prompts if prompt.name == name)

    def untrained_size(self, width: int, height: int) -> str | None:
        """Warning for a client that asks for a size at which the world was not trained; None = it was."""
        if (width, height) in self.sizes:
            return None
        trained = " or ".join(f"{w}x{h}" for w, h in self.sizes)
        return (
            f"untrained size: {width}x{height} was asked for, this world was trained at {trained}; expect poor pictures"
        )

    def as_hello(self) -> dict[str, Any]:
        """The world's part of a door's hello message."""
        told = msgspec.to_builtins(self)
        names = ("title", "about", "sizes", "metres_per_unit", "prompts", "starts", "map")
        return {**{name: told[name] for name in names}, "has_walls": self.grid is not None}


def read_card(folder: Path) -> WorldCard | None:
    """Return the card of a checkpoint directory, None if it has none. Raises ValueError in one line."""
    path = folder / CARD
    if not path.is_file():
        return None
    try:
        card = msgspec.json.decode(path.read_bytes(), type=WorldCard)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name in card.pictures:
        card_file(folder, name)
    return card


def card_file(folder: Path, name: str) -> Path:
    """The place of a file that a card names. Raises ValueError unless it is a file inside `folder`."""
    return confined((folder / name).parent, Path(name).name)


def with_defaults(
    additional_config: Any, card: WorldCard | None, size: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return vLLM's `additional_config` with the world's size and model options where the user has set nothing.

    size: the model's (height, width), for a checkpoint without a card; None = it has none of its own.
    """
    given = dict(additional_config) if isinstance(additional_config, Mapping) else {}
    omni = given.get("omni", {})
    if not isinstance(omni, Mapping):
        return given
    if card is not None:
        size = card.sizes[0][1], card.sizes[0][0]
        model = omni.get("model", {})
        omni = {**omni, "model": {**card.model, **model} if isinstance(model, Mapping) else model}
    if size is not None and not {"height", "width"} & omni.keys():
        omni = {"height": size[0], "width": size[1], **omni}
    return {**given, "omni": omni} if omni else given
