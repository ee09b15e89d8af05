# SPDX-License-Identifier: Apache-2.0
"""Writes docs/user_guide/options.md from the classes that read the options; tests/docs/test_options_page.py holds it.

python scripts/options.py

An option's text is the string literal under its field. Classes without such literals give it in
their docstring: "name: text", or "name, other: text" for several.
One that only another's text mentions, in back quotes, is explained there.
"""

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

PAGE = Path(__file__).parents[1] / "docs" / "user_guide" / "options.md"
WORKER = "vllm_omni.config:OmniConfig"
MODEL = "vllm_omni.model_executor.model_options:ModelOptions"
STREAMING = "vllm_omni.model_executor.streaming.options:StreamingOptions"
MODELS = {
    "LingBot World": "vllm_omni.model_executor.models.lingbot_world.config:LingBotOptions",
    "Causal Wan": "vllm_omni.model_executor.models.causal_wan.config:CausalWanOptions",
    "Wan 2.2": "vllm_omni.model_executor.models.wan2_2.config:Wan22Options",
    "Lance": "vllm_omni.model_executor.models.lance.config:LanceOptions",
    "Diffusers pipelines": "vllm_omni.model_executor.models.diffusers_pipeline.options:DiffusersOptions",
    "Qwen2.5-Omni": "vllm_omni.model_executor.models.qwen2_5_omni.options:StageOptions",
}
"""Model family -> the class of its `omni.model` options; options shared by streaming models are listed once."""

HEAD = """# Options

Written by `scripts/options.py` from the classes that read them; do not edit.

All options of this package stand under `--additional-config '{{"omni": {{...}}}}'`, those of a model under its key
`model`. A wrong name or a value out of range ends the start and names the allowed ones. {total} options in all; one
that several models have in the same words counts once.
"""


def load(path: str) -> type[msgspec.Struct]:
    module, name = path.split(":")
    found: type[msgspec.Struct] = getattr(importlib.import_module(module), name)
    return found


def field_texts(owner: type) -> dict[str, str]:
    """Return the string literals under the fields of a class, by field."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, TypeError):  # msgspec's own base has no source
        return {}
    found = {}
    for field, below in itertools.pairwise(getattr(tree, "body", [])):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(inspect.cleandoc(text).split())
    return found


def texts(options: type[msgspec.Struct]) -> dict[str, str]:
    """Return each option's text: the literal under its field, else the docstring of a class."""
    names = [field.name for field in msgspec.structs.fields(options)]
    word = rf"(?:{'|'.join(sorted(names, key=len, reverse=True))})(?: \([^)]*\))?"
    heading = re.compile(rf"(?<![\w.`])({word}(?:(?:, |; | and ){word})*): ")
    found: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        own = " ".join((inspect.cleandoc(owner.__dict__.get("__doc__") or "")).split())
        marks = list(heading.finditer(own))
        ends = [*(mark.start() for mark in marks), len(own)][1:] if marks else []
        for mark, end in zip(marks, ends, strict=True):
            text = own[mark.end() : end].strip().rstrip(";")
            for name in re.findall(r"\w+", re.sub(r"\([^)]*\)", "", mark[1])):
                if name in names:
                    found[name] = text
        found |= {name: text for name, text in field_texts(owner).items() if name in names}
    elsewhere = {name: f"see `{other}`" for name in names for other in found if f"`{name}`" in found[other]}
    return elsewhere | found


def allowed(kind: Any) -> str:
    """A type as a reader would write it."""
    if kind is type(None):
        return "none"
    if kind in (int, float, str, bool):
        return {int: "integer", float: "number", str: "text", bool: "true or false"}[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        return allowed(kind.__origin__) + "".join(_bounds(meta) for meta in kind.__metadata__)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (tuple, list):
        return f"list of {allowed(parts[0])}"
    if origin is dict:
        return "object"
    if parts:  # a union
        return " or ".join(allowed(part) for part in parts)
    return "object"


def _bounds(meta: Any) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{sign} {value:,}" for name, sign in signs.items() if (value := getattr(meta, name, None)) is not None]
    return f" {', '.join(bounds)}" if bounds else ""


def rows(options: type[msgspec.Struct]) -> list[tuple[str, str, str, str]]:
    """(name, default, allowed, text) of each option. Raises ValueError for one that its docstring does not name."""
    said, kinds, out = texts(options), get_type_hints(options, include_extras=True), []
    for field in msgspec.structs.fields(options):
        if field.name not in said:
            raise ValueError(f"{options.__name__}.{field.name}: no text in the docstring")
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        out.append((field.name, _spelled(default), allowed(kinds[field.name]), said[field.name]))
    return out


def _spelled(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return "see the text"
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"`{value}`"


def tables() -> dict[str, list[tuple[str, str, str, str]]]:
    """Heading -> its rows."""
    every = rows(load(MODEL))
    streaming = [row for row in rows(load(STREAMING)) if row not in every]
    shared = every + streaming
    out = {"The worker (`omni`)": rows(load(WORKER)), "Every model but diffusers' own (`omni.model`)": every}
    out["Every streaming model (`omni.model`)"] = streaming
    for title, path in MODELS.items():
        out[f"{title} (`omni.model`)"] = [row for row in rows(load(path)) if row not in shared]
    return out


def total() -> int:
    """Options in all; one that several models have in the same words counts once."""
    return len({(name, text) for lines in tables().values() for name, _, _, text in lines})


def render() -> str:
    parts = [HEAD.format(total=total())]
    for title, lines in tables().items():
        parts.append(f"\n## {title}\n\n| option | default | allowed | effect |\n|---|---|---|---|\n")
        cells = [(f"`{name}`", default, kind, text) for name, default, kind, text in lines]
        parts += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in cells]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
