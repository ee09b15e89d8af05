# SPDX-License-Identifier: Apache-2.0
"""Parse actions written as a single line of text on a command line, for example `"w*6 wl*3 -"`.

The example clients import this module, so it must not import torch.
"""

from typing import Any

from vllm_omni.camera_keys import CAMERA_KEYS


def parse_keys(text: str) -> list[list[str]]:
    """Parse text into the keys held in each latent frame.

    For example, `"w*2 wl -"` gives `[["w"], ["w"], ["w", "l"], []]`.

    The keys w a s d move and i k j l look around, `-` means no key, and `*N` repeats a token.

    Raises:
        ValueError: A token is invalid.
    """
    held: list[list[str]] = []
    for token in text.split():
        keys, _, times = token.partition("*")
        if not set(keys) <= {*CAMERA_KEYS, "-"} or (times and not times.isdecimal()):
            raise ValueError(
                f"keys are tokens of {' '.join(CAMERA_KEYS)} (or -) with an optional *count, got "
                f"{token!r}"
            )
        held += [[key for key in keys if key != "-"]] * int(times or 1)
    return held


def parse_actions(text: str) -> list[dict[str, Any]]:
    """Parse actions for any model, for example `"jump+forward*2 yaw=-0.1 scroll=1 -"`.

    Each token describes one latent frame: names of held buttons and `axis=value` terms, joined by
    `+`. `scroll=1` turns the wheel, `-` means no action, and `*N` repeats a token. The server
    checks the names.

    Raises:
        ValueError: A token is invalid.
    """
    frames: list[dict[str, Any]] = []
    for token in text.split():
        controls, _, times = token.partition("*")
        if times and not times.isdecimal():
            raise ValueError(
                f"an action's count must be a whole number, as in jump*3; got {token!r}"
            )
        frames += [_frame(controls, token)] * int(times or 1)
    return frames


def _frame(controls: str, token: str) -> dict[str, Any]:
    frame: dict[str, Any] = {"buttons": [], "axes": {}, "scroll": 0.0}
    for control in controls.split("+") if controls != "-" else []:
        name, sign, value = control.partition("=")
        if not name:
            raise ValueError(f"actions are buttons and axis=value joined by +, or -; got {token!r}")
        if not sign:
            frame["buttons"].append(name)
            continue
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, as in {name}=0.5; got {token!r}") from None
        if name == "scroll":
            frame["scroll"] = number
        else:
            frame["axes"][name] = number
    return frame
