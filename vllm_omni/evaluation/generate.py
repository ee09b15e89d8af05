# SPDX-License-Identifier: Apache-2.0
"""Uses a server to generate an evaluation run's files: clips, images, or videos of a world steered
by key programs.
"""

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_omni.actions import ActionSpace
from vllm_omni.evaluation.client import EvaluatedServer, ServerRefusedError
from vllm_omni.evaluation.run_folder import RunFolder
from vllm_omni.evaluation.steering import Controls, program_keys
from vllm_omni.worlds.movement import YAW_DEGREES

PROMPTS: Final = (
    "A red fox walks through fresh snow between birch trees",
    "Waves roll onto a sandy beach at sunset",
    "A steam train crosses a stone bridge in a green valley",
    "Rain falls on a quiet city street at night",
)
"""Default prompts for models that generate images or clips."""
_MOUSE_PIXELS: Final = 20.0
"""Mouse motion in pixels per latent frame. If a world has no look keys, key programs use this
motion to turn the camera."""


@dataclass(frozen=True)
class Start:
    """A video's initial conditions."""

    prompt: str | None
    """Text prompt, or None if the model takes no prompt."""
    image: bytes | None
    """Start image as a PNG or JPEG file, or None if the model starts from the prompt only."""

    def fields(self) -> dict[str, Any]:
        """Return the initial conditions as JSON request fields."""
        fields: dict[str, Any] = {} if self.prompt is None else {"prompt": self.prompt}
        if self.image is not None:
            kind = "png" if self.image.startswith(b"\x89PNG") else "jpeg"
            data = base64.b64encode(self.image).decode()
            fields["input_reference"] = {"image_url": f"data:image/{kind};base64,{data}"}
        return fields


@dataclass(frozen=True)
class RunOptions:
    """The user's options for generating videos."""

    programs: Sequence[str]
    """Names of the key programs to run, for worlds with controls."""
    prompts: Sequence[str]
    """The user's prompts. If empty, the world's prompts or `PROMPTS` are used."""
    images: Sequence[bytes]
    """Start images, either one for each prompt or one for all prompts. If empty, the world's start
    images are used.
    """
    default_image: bytes
    """Start image for models that require one, used if neither the user nor the world provides one.
    """
    default_prompt: str
    """Prompt for worlds without prompts of their own, used if the user provides no prompt."""
    starts: int
    """Number of the world's start images to use."""
    samples: int
    """Number of videos for each prompt and program. The videos have consecutive seeds."""
    turn: int
    """Number of latent frames in one phase (turn) of a key program."""
    seed: int
    """Seed of the first sample."""
    size: str | None
    """Video or image size as `WIDTHxHEIGHT`, or None for the model's default size."""
    num_frames: int | None
    """Number of frames in a clip, or None for the model's default number."""


def generate(server: EvaluatedServer, folder: RunFolder, options: RunOptions) -> None:
    """Generate all files of a run and print one line per file.

    Raises:
        ServerRefusedError: The server refused a request.
    """
    hello = server.greeting()
    if hello is None:
        _Generation(server, folder, options).clips([])
        return
    space = msgspec.convert(hello["actions"], ActionSpace)
    starts = _world_starts(server, hello.get("world"), space, options)
    generation = _Generation(server, folder, options)
    if not space.has_controls:
        generation.clips(starts)
        return
    for program in options.programs:
        if entries(space, program_keys(program, 1)) is None:
            print(f"{program}: left out, because the model has no control for it")
            continue
        keys = program_keys(program, options.turn)
        controls = _controls(hello, space, keys)
        fields = {"num_frames": controls.num_frames, "actions": entries(space, keys)}
        generation.videos(starts, fields, program, controls)


class _Generation:
    """Sends one run's requests to the server and stores the results in the run's folder."""

    def __init__(self, server: EvaluatedServer, folder: RunFolder, options: RunOptions) -> None:
        self._server, self._folder, self._options = server, folder, options

    def clips(self, starts: Sequence[Start]) -> None:
        """Generate clips that are not steered by keys, or images if the model does not generate
        clips.
        """
        options = self._options
        if not starts:
            images: list[bytes | None] = [*options.images] or [None]
            prompts = list(options.prompts or PROMPTS)
            starts = [Start(text, images[n % len(images)]) for n, text in enumerate(prompts)]
        fields = {} if options.num_frames is None else {"num_frames": options.num_frames}
        try:
            self.videos(starts, fields)
        except ServerRefusedError as refused:
            if refused.param == "input_reference" and starts[0].image is None:
                starts = [Start(start.prompt, options.default_image) for start in starts]
                self.videos(starts, fields)
            elif refused.code == "unsupported_by_model" and not fields:
                for start, seed in self._samples(starts):
                    self._add(".png", *self._timed(self._server.image, start, seed, {}), start)
            else:
                raise

    def videos(
        self,
        starts: Sequence[Start],
        fields: Mapping[str, Any],
        program: str | None = None,
        controls: Controls | None = None,
    ) -> None:
        """Generate the samples for each set of initial conditions.

        Args:
            starts: The videos' initial conditions.
            fields: Additional JSON fields for the requests.
            program: Name of the key program. None: the videos are not steered.
            controls: Keys that the program holds in each latent frame.
        """
        for start, seed in self._samples(starts):
            video, job, took_s = self._timed(self._server.video, start, seed, fields)
            poses = job.get("world_poses")
            held = controls and msgspec.structs.replace(controls, world_poses=poses)
            self._add(".mp4", video, job, took_s, start, program=program, controls=held)

    def _samples(self, starts: Sequence[Start]) -> Iterator[tuple[Start, int]]:
        for start in starts:
            for sample in range(self._options.samples):
                yield start, self._options.seed + sample

    def _timed(
        self,
        make: Callable[[Mapping[str, Any]], tuple[bytes, dict[str, Any]]],
        start: Start,
        seed: int,
        fields: Mapping[str, Any],
    ) -> tuple[bytes, dict[str, Any], float]:
        size = {} if self._options.size is None else {"size": self._options.size}
        started_s = time.monotonic()
        content, reply = make({**start.fields(), **size, **fields, "seed": seed})
        return content, reply, time.monotonic() - started_s

    def _add(
        self,
        suffix: str,
        content: bytes,
        reply: Mapping[str, Any],
        took_s: float,
        start: Start,
        **fields: Any,
    ) -> None:
        prompt = start.prompt or ""
        path = self._folder.next_path(prompt, suffix)
        path.write_bytes(content)
        self._folder.add(path, prompt=prompt, seed=int(reply["seed"]), **fields)
        print(f"{fields.get('program') or 'generated'}: {path.name}, {took_s:.0f} s", flush=True)


def entries(space: ActionSpace, keys: Sequence[str]) -> list[Any] | None:
    """Return the actions that hold the given keys, one for each latent frame. The result is None if
    the model has no control for one of the keys.
    """
    found = [_entry(space, key) for key in keys]
    return None if None in found else found


def _entry(space: ActionSpace, key: str) -> list[str] | dict[str, Any] | None:
    """Return the action for a camera key: a button, or else a motion of the axis that the mouse
    moves. The result is None if the model has neither the button nor the axis.
    """
    if not key:
        return []
    if key in space.button_names:
        return [key]
    if key in "wasd":
        button = space.button_of_key(key)
        return None if button is None else [button]
    direction, sign = {"j": ("x", -1), "l": ("x", 1), "i": ("y", -1), "k": ("y", 1)}[key]
    for axis in space.axes:
        if axis.mouse == direction:
            return {"axes": {axis.name: sign * axis.scale * _MOUSE_PIXELS}}
    return None


def _controls(hello: Mapping[str, Any], space: ActionSpace, keys: list[str]) -> Controls:
    stride = hello["vae_stride"][0]
    return Controls(
        keys=keys,
        first_frames=(hello["first_chunk_frames"] - 1) % stride + 1,
        later_frames=stride,
        focal=hello["key_focal"] / hello["default_size"][0],
        turn_degrees=YAW_DEGREES if space.pose else None,
    )


def _world_starts(
    server: EvaluatedServer,
    world: Mapping[str, Any] | None,
    space: ActionSpace,
    options: RunOptions,
) -> list[Start]:
    """Return the sessions' initial conditions. The user's prompts and images take precedence over
    the world's.
    """
    prompts: Sequence[str | None] = options.prompts
    images: Sequence[bytes | None] = options.images
    if world is not None and world["starts"]:
        texts = {prompt["name"]: prompt["text"] for prompt in world["prompts"]}
        chosen = world["starts"][: options.starts]
        prompts = prompts or [texts[start["prompt"]] for start in chosen]
        images = images or [server.page_file(start["file"]) for start in chosen]
    prompts = [None] if space.prompt == "none" else prompts or [options.default_prompt]
    images = [None] if space.image == "none" else images or [options.default_image]
    count = max(len(prompts), len(images))
    return [Start(prompts[n % len(prompts)], images[n % len(images)]) for n in range(count)]
