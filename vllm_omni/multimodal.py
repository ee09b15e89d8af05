# SPDX-License-Identifier: Apache-2.0
"""Input tensors of a diffusion request in vLLM's `multi_modal_data`.

    data = {"image": image, "camera": {"poses": poses_N44, "intrinsics": intrinsics_N4}}
    llm.encode({"prompt_token_ids": [0], "multi_modal_data": data},
               pooling_params=DiffusionParams(...).to_pooling_params(), pooling_task="plugin")

The value of a modality is one tensor or a mapping of several named tensors, such as `camera` above.
`actions` is a mapping of `buttons` [N, B], `axes` [N, A] and `scroll` [N], with one row per latent
frame, for B buttons and A axes (vllm_omni/actions.py). The tensors reach the worker unchanged.
Tensors are not tokenized, hashed or cached, because the camera path of a chunk never repeats.
Tensors can also be sent in the request's pooling parameters (`inputs.request_tensors`).
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, ImageOps
from vllm.inputs import MultiModalDataDict, MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    TimingContext,
)

from vllm_omni.actions import ACTION_TENSORS

MODALITIES: Final = ("image", "video", "audio", "camera", "actions", "tensors")
"""Keys of `multi_modal_data`. A request has at most one item per key. The value of `tensors` is a
mapping of all model inputs that belong to no other key.
"""


def rgb_image(image: Image.Image) -> Image.Image:
    """Convert an image to RGB mode, as image viewers display it.

    The EXIF rotation is applied. Transparent areas are composited on white, as in vLLM for language
    models; otherwise, the colours hidden in these areas would become visible. 16-bit greyscale
    images are scaled to 8 bits.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # because Pillow would clip 16-bit grey to 255
        values_HW = np.asarray(image).astype(np.int64)
        grey_HW = (values_HW >> 8).clip(0, 255).astype(np.uint8)
        if "transparency" in image.info:
            grey_HW[values_HW == image.info["transparency"]] = 255
        image = Image.fromarray(grey_HW)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


class NamedTensors(ModalityDataItems[dict[str, torch.Tensor], dict[str, torch.Tensor]]):
    """All tensors of one modality, which vLLM treats as a single item."""

    def get_count(self) -> int:
        return 1

    def get(self, index: int) -> dict[str, torch.Tensor]:
        return (self.data,)[index]  # vLLM iterates over items until IndexError

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return self.data


class NamedTensorsParser(MultiModalDataParser):
    def parse_mm_data(self, mm_data: MultiModalDataDict) -> MultiModalDataItems:
        """Parse `multi_modal_data`.

        Raises:
            ValueError: A modality is unknown, or a value is not an array. The message names the
                modality.
        """
        items = MultiModalDataItems()
        for modality, value in mm_data.items():
            if modality not in MODALITIES:
                raise ValueError(
                    f"multi_modal_data holds {modality!r}; allowed: {', '.join(MODALITIES)}"
                )
            named = value if isinstance(value, Mapping) else {modality: value}
            if modality == "actions" and not (named.keys() <= set(ACTION_TENSORS) and named):
                raise ValueError(
                    f"multi_modal_data['actions'] must be a map of {', '.join(ACTION_TENSORS)}, "
                    f"got {sorted(named)}"
                )
            items[modality] = NamedTensors(
                {str(key): _tensor(str(key), data) for key, data in named.items()}, modality
            )
        return items


class NamedTensorsInfo(BaseProcessingInfo):
    def get_data_parser(self) -> MultiModalDataParser:
        return NamedTensorsParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(MODALITIES, 1)

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, 1)  # the minimum for vLLM; an item has no tokens


class NoDummyInputs(BaseDummyInputsBuilder[NamedTensorsInfo]):
    """Minimal dummy input for vLLM's processor warm-up."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> MultiModalDataDict:
        return {"image": torch.zeros(1, dtype=torch.uint8)}


class NamedTensorsProcessor(BaseMultiModalProcessor[NamedTensorsInfo]):
    requires_tokenizer = False

    def _get_mm_fields_config(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        return {}

    def _get_prompt_updates(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        return []

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """Return an engine input with one prompt token and the unmodified tensors."""
        field = MultiModalBatchedField()
        items = {
            modality: [
                MultiModalKwargsItem(
                    {
                        name: MultiModalFieldElem(data=tensor, field=field)
                        for name, tensor in inputs.mm_data_items.get_items(modality, NamedTensors)
                        .get(0)
                        .items()
                    }
                )
            ]
            for modality in inputs.mm_data_items
        }
        return mm_input(
            prompt_token_ids=[0],
            mm_kwargs=MultiModalKwargsItems(items),
            mm_hashes={modality: [uuid.uuid4().hex] for modality in items},
            mm_placeholders={
                modality: [PlaceholderRange(offset=0, length=0)] for modality in items
            },
        )


def feature_tensors(features: Sequence[MultiModalFeatureSpec]) -> dict[str, torch.Tensor]:
    """Return the tensors in the `mm_features` of a scheduled request, keyed by name."""
    return {
        name: elem.data
        for feature in features
        if feature.data is not None
        for name, elem in feature.data.items()
        if isinstance(elem.data, torch.Tensor)
    }


def _tensor(name: str, data: Any) -> torch.Tensor:
    """Convert a value to a CPU tensor. Images become uint8 [H, W, 3] or [N, H, W, 3]."""
    if isinstance(data, torch.Tensor):
        return data.detach().cpu()
    if isinstance(data, Image.Image):
        return torch.from_numpy(np.array(rgb_image(data)))
    if (
        isinstance(data, Sequence)
        and data
        and all(isinstance(entry, Image.Image) for entry in data)
    ):
        sizes = {entry.size for entry in data}
        if len(sizes) > 1:
            raise ValueError(
                f"multi_modal_data[{name!r}]: the images must have one size, got {sorted(sizes)}"
            )
        return torch.stack([_tensor(name, entry) for entry in data])
    try:
        array = np.asarray(data)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"dtype {array.dtype}")
        if name == "image" and array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 4:
            return _tensor(name, Image.fromarray(array))
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"multi_modal_data[{name!r}] must be an array, a tensor or an image, got "
            f"{type(data).__name__}"
        ) from error
