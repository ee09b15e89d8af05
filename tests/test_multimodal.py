# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's `multi_modal_data`: the allowed values and how they reach the model."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_client import running_engine
from PIL import Image

from vllm_omni.actions import ActionFrame
from vllm_omni.inputs import DiffusionParams
from vllm_omni.multimodal import NamedTensorsParser
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.testing.null.world import marks

POSES = np.tile(np.eye(4), (9, 1, 1))
INTRINSICS = np.full((9, 4), 30.0, np.float32)


def parse(**data: Any) -> dict[str, torch.Tensor]:
    items = NamedTensorsParser().parse_mm_data(data)
    return {name: tensor for modality in items.values() for name, tensor in modality.get(0).items()}


def test_maps_are_tensors_by_key_and_arrays_keep_their_dtype() -> None:
    tensors = parse(
        camera={"poses": POSES, "intrinsics": INTRINSICS},
        tensors={"prompt_embeds": torch.ones(2, 3)},
    )
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "poses": (torch.float64, (9, 4, 4)),
        "intrinsics": (torch.float32, (9, 4)),
        "prompt_embeds": (torch.float32, (2, 3)),
    }


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (Image.new("RGBA", (6, 4)), (4, 6, 3)),
        ([Image.new("RGB", (6, 4)), Image.new("L", (6, 4))], (2, 4, 6, 3)),
        (np.zeros((4, 6, 3), np.uint8), (4, 6, 3)),
    ],
)
def test_images_are_rgb_pixels(image: Any, shape: tuple[int, ...]) -> None:
    tensor = parse(image=image)["image"]
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, shape)


@pytest.mark.parametrize("as_array", [False, True])
def test_transparent_parts_of_an_image_become_white(as_array: bool) -> None:
    """An image's transparent pixels become white, so that their hidden colour does not become
    visible.
    """
    hidden = Image.new("RGBA", (6, 4), (255, 0, 255, 0))
    assert (parse(image=np.asarray(hidden) if as_array else hidden)["image"] == 255).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"pose": POSES},
            "multi_modal_data holds 'pose'; allowed: image, video, audio, camera, actions, tensors",
        ),
        (
            {"image": "start.png"},
            r"multi_modal_data\['image'\] must be an array, a tensor or an image, got str",
        ),
        ({"camera": {"poses": [[1], [1, 2]]}}, r"multi_modal_data\['poses'\] must be an array"),
        ({"actions": {"keys": np.zeros((3, 8))}}, "must be a map of buttons, axes, scroll, got"),
        ({"actions": np.zeros((3, 8))}, "must be a map of buttons, axes, scroll"),
        ({"image": [Image.new("RGB", (6, 4)), Image.new("RGB", (4, 6))]}, "must have one size"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**data)


def test_tensors_and_multi_modal_data_give_the_same_chunk(null_world: Path) -> None:
    """A real engine generates the same chunk from tensors and from `multi_modal_data`.

    The null world's latents depend on the poses, so different poses would yield a different chunk.
    """

    async def scenario() -> None:
        async with running_engine(null_world, gpu_memory_utilization=0.1) as client:

            async def chunk(name: str, scale: float) -> torch.Tensor:
                params = DiffusionParams(
                    session_id=name, prompt="a field", seed=1, output="latents"
                )
                camera = {"poses": POSES * scale, "intrinsics": INTRINSICS}
                prompt = {"prompt_token_ids": [0], "multi_modal_data": {"camera": camera}}
                async for output in client.engine.encode(prompt, params.to_pooling_params(), name):
                    last = output
                return unpack(last.outputs.data)[1]["latents"].clone()

            poses = torch.from_numpy(POSES)
            fields = {"prompt": "a field", "seed": 1, "output": "latents"}
            _, expected = await client.send({"poses": poses}, session_id="tensors", **fields)
            assert torch.equal(await chunk("multi-modal", 1.0), expected["latents"])
            assert not torch.equal(await chunk("another", 2.0), expected["latents"])

    asyncio.run(scenario())


def test_actions_are_a_modality(null_world: Path) -> None:
    """A real engine generates the same chunk from dense action arrays and from typed action
    frames.
    """
    space = {
        "buttons": [{"name": "w", "title": "forward"}, {"name": "jump", "title": "jump"}],
        "axes": [{"name": "dx", "title": "turn", "unit": "pixels", "kind": "motion", "mouse": "x"}],
        "scroll": True,
        "prompt": "none",
        "image": "none",
    }
    buttons = np.array([[1, 0], [0, 1], [0, 0]])
    dense = {
        "buttons": buttons,
        "axes": np.array([[0.0], [-20.0], [0.0]]),
        "scroll": np.array([0, 0, 1]),
    }
    typed = [["w"], ActionFrame(("jump",), {"dx": -20.0}), ActionFrame(scroll=1)]

    async def scenario() -> None:
        omni = {"model": {"actions": space}}
        async with running_engine(null_world, gpu_memory_utilization=0.1, omni=omni) as client:

            async def chunk(
                name: str, data: dict[str, Any]
            ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
                prompt = {"prompt_token_ids": [0], "multi_modal_data": {"actions": data}}
                params = DiffusionParams(session_id=name, seed=1)
                async for output in client.engine.encode(prompt, params.to_pooling_params(), name):
                    last = output
                return unpack(last.outputs.data)

            _, got = await chunk("dense", dense)
            _, expected = await client.send(session_id="typed", seed=1, actions=typed)
            assert torch.equal(got["frames"], expected["frames"])
            frames = got["frames"].numpy()
            assert [marks.read(frames[index], 4) for index in (0, 1, 8)] == [
                [255, 0, 128, 128],
                [0, 255, 108, 128],
                [0, 0, 128, 255],
            ]
            with pytest.raises(RequestFailed, match="buttons must be numbers of shape"):
                await chunk("wrong", {"buttons": buttons[:, :1]})

    asyncio.run(scenario())
