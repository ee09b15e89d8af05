# SPDX-License-Identifier: Apache-2.0
"""`world.json` of a checkpoint directory: sizes, prompts and start images of a world.

A checkpoint of any model may have a world description. The config parser passes the description to
the endpoints (`CONFIG_KEY`). `vllm serve` uses the sizes and model options in the description as
defaults, and the web page is served with the images that the description names. This module does
not depend on a model or on sockets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from vllm_omni.model_executor.checkpoint.tensor_files import confined
from vllm_omni.worlds.movement import PITCH_LIMIT_DEGREES

CARD: Final = "world.json"
CONFIG_KEY: Final = "omni_world"
"""Key of the world description in vLLM's config object. The value consists of JSON types."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ImageFile = Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9_]+/)?[a-z0-9_]+\.(png|jpg)\Z")]
Video = Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9_]+/)?[a-z0-9_]+\.mp4\Z")]
Side = Annotated[int, msgspec.Meta(ge=16, le=4096)]


class WorldPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that the web page offers as a button."""

    name: Name
    """Name of the prompt, shown as the button text."""
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    """Text of the prompt."""


class StartImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A start image and its world pose."""

    name: Name
    """Name of the start image, as shown to users."""
    prompt: Name
    """Name of the prompt that matches the image."""
    file: ImageFile
    """Path of the image, relative to the checkpoint directory."""
    x_m: float
    """East coordinate of the camera, in metres."""
    z_m: float
    """North coordinate of the camera, in metres."""
    heading_degrees: float
    """View direction in degrees, clockwise from north."""
    pitch_degrees: float = 0.0
    """View angle above the horizon, in degrees."""


class WorldMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Map of the ground. North is up, and the position (0, 0) is in the centre."""

    file: ImageFile
    """Path of the map image, relative to the checkpoint directory."""
    side_m: Annotated[float, msgspec.Meta(gt=0)]
    """Side length of the map in metres. The world repeats after this distance."""


class WorldGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The image file of the world's occupancy grid (`grid.OccupancyGrid`)."""

    file: ImageFile
    """Path of the grid image, relative to the checkpoint directory."""
    side_m: Annotated[float, msgspec.Meta(gt=0)]
    """Side length of the grid in metres. The world repeats after this distance."""


class WorldTour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prepared walk for demonstrations."""

    start: ImageFile
    """Path of the start image. It must be one of the world's start images."""
    seed: int
    """Seed of the walk's session."""
    keys: list[Annotated[str, msgspec.Meta(pattern=r"^[a-z]*\Z")]]
    """Letters of the keys held during each latent frame."""
    prompts: list[tuple[int, Name]]
    """Pairs of a latent frame's index and the name of the prompt that applies from this frame on.
    The first pair starts at frame 0.
    """
    truth: Video | None = None
    """Video of the same walk rendered from the original world, with one frame per generated frame.
    """


class WorldDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a world, as stored in `world.json`."""

    domain: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,64}\Z")]
    """Machine-readable identifier of the world."""
    title: Name
    """Name of the world, as shown to users."""
    about: Annotated[str, msgspec.Meta(max_length=1000)]
    """Text that describes what the world contains, and how it responds to images from other
    sources."""
    sizes: Annotated[tuple[tuple[Side, Side], ...], msgspec.Meta(min_length=1)]
    """Video sizes (width, height), in pixels, used in training. The first size is the default."""
    metres_per_unit: Annotated[float, msgspec.Meta(gt=0)]
    """Length in metres of one unit of camera translation."""
    prompts: tuple[WorldPrompt, ...] = ()
    """Prompts that clients can offer to users."""
    starts: tuple[StartImage, ...] = ()
    """Start images that clients can offer to users."""
    focal: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Focal length of the camera divided by the image width. Default: the model's focal length."""
    map: WorldMap | None = None
    """Map of the world. Default: no map."""
    grid: WorldGrid | None = None
    """Occupancy grid with cells that cameras cannot enter. Default: cameras can go anywhere."""
    pitch_limit_degrees: Annotated[float, msgspec.Meta(ge=0, le=PITCH_LIMIT_DEGREES)] = (
        PITCH_LIMIT_DEGREES
    )
    """Largest view angle above or below the horizon, in degrees, that can be reached with keys and
    axes. Used only if the model receives the world pose.
    """
    tour: WorldTour | None = None
    """Prepared walk for demonstrations. Default: no prepared walk."""
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    """Defaults for options in `omni.model`. They override the defaults of a preset
    (`model_executor/presets.py`)."""

    def __post_init__(self) -> None:
        names = [prompt.name for prompt in self.prompts]
        wanted = [start.prompt for start in self.starts]
        if self.tour is not None:
            wanted += [name for _, name in self.tour.prompts]
            if self.tour.start not in [start.file for start in self.starts]:
                raise ValueError(
                    f"tour.start must be the file of one of `starts`, got {self.tour.start!r}"
                )
            if not self.tour.prompts or self.tour.prompts[0][0] != 0:
                raise ValueError("tour.prompts must start at latent frame 0")
        if unknown := [name for name in wanted if name not in names]:
            raise ValueError(
                f"no prompt is named {unknown[0]!r}; available: {', '.join(names) or 'none'}"
            )

    @property
    def images(self) -> list[str]:
        """Paths of the images that the web page shows: the start images and the map."""
        return [
            *(start.file for start in self.starts),
            *([self.map.file] if self.map is not None else []),
        ]

    def prompt(self, name: str) -> str:
        return next(prompt.text for prompt in self.prompts if prompt.name == name)

    def untrained_size(self, width: int, height: int) -> str | None:
        """Return a warning if the world was not trained at the given size, otherwise None."""
        if (width, height) in self.sizes:
            return None
        trained = " or ".join(f"{w}x{h}" for w, h in self.sizes)
        return (
            f"untrained size: {width}x{height} was requested, this world was trained at {trained}; "
            "expect poor image quality"
        )

    def as_hello(self) -> dict[str, Any]:
        """Return the fields that the world adds to an endpoint's hello message."""
        reported = msgspec.to_builtins(self)
        names = ("title", "about", "sizes", "metres_per_unit", "prompts", "starts", "map")
        return {**{name: reported[name] for name in names}, "has_walls": self.grid is not None}


def read_description(folder: Path) -> WorldDescription | None:
    """Return the world description of a checkpoint directory, or None if it has none.

    Raises:
        ValueError: The file is invalid. The message is one line.
    """
    path = folder / CARD
    if not path.is_file():
        return None
    try:
        description = msgspec.json.decode(path.read_bytes(), type=WorldDescription)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name in description.images:
        description_file(folder, name)
    return description


def description_file(folder: Path, name: str) -> Path:
    """Return the path of a file that a world description names.

    Raises:
        ValueError: The name does not refer to a file inside `folder`.
    """
    return confined((folder / name).parent, Path(name).name)


def with_defaults(
    additional_config: Any,
    description: WorldDescription | None,
    size: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return vLLM's `additional_config` with the world's size and model options as defaults.

    Args:
        additional_config: Value of vLLM's `--additional-config`.
        description: World description of the checkpoint, or None if it has none.
        size: Default (height, width) of the model, used for checkpoints without a world
            description. None if the model has no default size.
    """
    given = dict(additional_config) if isinstance(additional_config, Mapping) else {}
    omni = given.get("omni", {})
    if not isinstance(omni, Mapping):
        return given
    if description is not None:
        size = description.sizes[0][1], description.sizes[0][0]
        model = omni.get("model", {})
        omni = {
            **omni,
            "model": {**description.model, **model} if isinstance(model, Mapping) else model,
        }
    if size is not None and not {"height", "width"} & omni.keys():
        omni = {"height": size[0], "width": size[1], **omni}
    return {**given, "omni": omni} if omni else given
