# SPDX-License-Identifier: Apache-2.0
"""Tables of options, environment variables and error codes are complete and show the real
defaults.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import snippets as docs

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.engine.environment import PREFIX
from vllm_omni.entrypoints.errors import RETRYABLE, WebSocketCloseCode
from vllm_omni.entrypoints.hidden_states_store import StoreLimits
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.webrtc.options import WebRtcOptions

DOCS = docs.REPO / "docs"
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "Mi": 1 << 20, "Mpx": 1 << 20}


def defaults(*structs: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        field.name: field.default for struct in structs for field in msgspec.structs.fields(struct)
    }


def rows(page: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (name without `prefix`, default) for each table row of `page` whose first cell contains
    names.

    A row may have several names.
    """
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        names = (
            re.findall(rf"`(?:omni\.)?{prefix}([a-zA-Z_]+)`", cells[1]) if len(cells) > 3 else []
        )
        shown = [part.strip() for part in cells[2].split(",")] if len(names) > 1 else cells[2:3]
        yield from zip(names, shown, strict=len(shown) > 1)


def shown_number(text: str) -> float | None:
    """Return the number in a cell, or None if the cell contains words or is empty."""
    match = re.fullmatch(r"([\d.]+)(?: (MiB|GiB|Mi|Mpx))?", text)
    return float(match[1]) * UNITS.get(match[2], 1) if match else None


def wrong_numbers(page: str, prefix: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    found = {name.lower(): shown for name, shown in rows(page, prefix) if name.lower() in fields}
    assert found
    return {
        name: (shown, fields[name])
        for name, shown in found.items()
        if (number := shown_number(shown)) is not None and number != fields[name]
    }


def test_the_serving_page_names_every_option() -> None:
    """The table on the serving page lists exactly the `omni.*` options."""
    assert {name for name, _ in rows("how_to/serving.md", "")} == set(defaults(OmniConfig))


@pytest.mark.parametrize(
    ("page", "prefix", "structs"),
    [
        ("how_to/serving.md", "", [OmniConfig]),
        ("how_to/hidden_states.md", "", [OmniConfig]),
        ("how_to/hidden_states.md", PREFIX, [StoreLimits]),
        ("reference/realtime_world_camera.md", PREFIX, [EndpointLimits]),
        ("reference/realtime_video.md", PREFIX, [EndpointLimits]),
        ("reference/realtime_webrtc.md", PREFIX, [WebRtcOptions]),
        ("reference/images_and_videos_api.md", "", [EndpointLimits, MediaLimits]),
    ],
)
def test_defaults_in_the_tables_equal_those_of_the_options(
    page: str, prefix: str, structs: list[type[msgspec.Struct]]
) -> None:
    """The numbers in the tables equal the options' defaults."""
    assert wrong_numbers(page, prefix, defaults(*structs)) == {}


def test_every_bound_of_the_endpoints_is_in_a_table() -> None:
    """Every limit that an operator can set is listed in a table."""
    pages = (
        "reference/realtime_world_camera.md",
        "reference/realtime_video.md",
        "how_to/hidden_states.md",
    )
    named = {name.lower() for page in pages for name, _ in rows(page, PREFIX)}
    named |= {name.lower() for name, _ in rows("reference/images_and_videos_api.md", "")}
    assert set(defaults(EndpointLimits, MediaLimits, StoreLimits)) - named == set()


def test_codes_that_clients_switch_on_are_in_the_guide() -> None:
    """The guide lists the retryable error codes and every close code."""
    page = (DOCS / "reference" / "realtime_world_camera.md").read_text()
    again = page.split("\n- try again: ")[1].split("\n- ")[0]
    assert set(re.findall(r"`([a-z_]+)`", again)) - {"retry_after_ms"} == RETRYABLE
    assert set(map(int, re.findall(r"^\| (\d{4}) \|", page, re.M))) - {1009} == set(
        WebSocketCloseCode
    ), "1009 is uvicorn's"
