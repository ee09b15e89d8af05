# SPDX-License-Identifier: Apache-2.0
"""Named images in the body of `/v1/videos`, in JSON or in a form, and the errors for invalid named
images.
"""

from typing import Any

import pytest

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.openai.body import ParsedBody
from vllm_omni.entrypoints.openai.videos.routes import _named_images, _reference

URL = "data:image/png;base64,AAAA"


def test_images_come_as_data_urls_and_as_files() -> None:
    """Named images are read from data: URLs and files and removed from the fields. The start image
    stays separate from them.
    """
    body = ParsedBody(
        {"images": {"head": {"image_url": URL}, "left": URL}, "prompt": "a path"},
        {"images[back]": [b"file"], "input_reference": [b"start"]},
        is_form=True,
    )
    assert _named_images(body) == {"head": URL, "left": URL, "back": b"file"}
    assert body.fields == {"prompt": "a path"}
    assert _reference(body) == b"start"


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"images": [URL]}, {}, "images"),
        ({"images": {f"view{n}": URL for n in range(17)}}, {}, "images"),
        ({"images": {"head": "https://example.com/a.png"}}, {}, "images.head"),
        ({"images": {"head": {"url": URL}}}, {}, "images.head"),
        ({"images": {"head": URL}}, {"images[head]": [b"file"]}, "images"),
        ({}, {"images[head]": [b"one", b"two"]}, "images"),
    ],
    ids=["list", "too many", "other URL", "other key", "twice", "two files"],
)
def test_bad_images_are_refused(
    fields: dict[str, Any], files: dict[str, list[bytes]], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        _named_images(ParsedBody(fields, files))
    assert (refused.value.status, refused.value.param) == (400, param)
