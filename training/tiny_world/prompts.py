# SPDX-License-Identifier: Apache-2.0
"""Sixty prompts for each style of the village.

The demo and the web page offer the first prompt of each style.
"""

from training.tiny_world.village import STYLES

_PLACES = (
    "the village",
    "a small village",
    "a quiet village",
    "an old village",
    "the village square",
    "a village street",
)
_LIGHTS: dict[str, tuple[str, ...]] = {
    "day": (
        "{place} on a sunny day",
        "{place} by day, bright sunshine",
        "daylight over {place}",
        "{place}, a clear summer day, blue sky",
        "a walk through {place} at noon",
        "{place} in summer, green grass",
        "sunny weather, {place} under a blue sky",
        "{place} in the morning sun, daytime",
        "a bright day in {place}",
        "{place}, daytime, a few clouds",
    ),
    "dusk": (
        "{place} at dusk",
        "{place} at sunset, lit windows",
        "dusk over {place}, an orange sky",
        "{place} in the evening, the sun is low",
        "a walk through {place} at nightfall",
        "{place} at twilight, lamps behind the windows",
        "evening, {place} under a purple sky",
        "{place} after sunset, dusk",
        "a dark evening in {place}",
        "{place}, golden hour, long shadows",
    ),
    "snow": (
        "{place} in the snow",
        "{place} in winter, snow",
        "snow over {place}, a white sky",
        "{place}, a cold winter day, snowy roofs",
        "a walk through {place} covered in snow",
        "{place} in winter, white ground",
        "winter, {place} under grey clouds and snow",
        "{place} after snowfall",
        "a snowy day in {place}",
        "{place}, frost and snow, winter",
    ),
}

PROMPTS: dict[str, list[str]] = {
    style: [template.format(place=place) for template in _LIGHTS[style] for place in _PLACES]
    for style in STYLES
}
