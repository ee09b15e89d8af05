# SPDX-License-Identifier: Apache-2.0
"""Held keys as one line of text, for command lines: `"w*6 wl*3 -"`. Knows no door. Held by tests/examples."""

KEYS = "wasdijkl"


def parse_keys(text: str) -> list[list[str]]:
    """Keys held per latent frame: `"w*2 wl -"` -> `[["w"], ["w"], ["w", "l"], []]`. Raises ValueError.

    w a s d move, i k j l look, `-` is nothing; `*N` repeats a token.
    """
    held: list[list[str]] = []
    for token in text.split():
        keys, _, times = token.partition("*")
        if not set(keys) <= {*KEYS, "-"} or (times and not times.isdecimal()):
            raise ValueError(f"keys are tokens of {' '.join(KEYS)} (or -) with an optional *count, got {token!r}")
        held += [[key for key in keys if key != "-"]] * int(times or 1)
    return held
