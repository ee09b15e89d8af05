# SPDX-License-Identifier: Apache-2.0
"""Generate docs/reference/engine_arguments.md from the table of arguments.

    python scripts/engine_arguments.py

tests/test_engine_arguments.py fails if the page is out of date.
"""

from pathlib import Path

from vllm_omni.engine_arguments.table import ROWS, ArgumentGroup, ArgumentVerdict

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "engine_arguments.md"

HEAD = """# vLLM's engine arguments

Written by `scripts/engine_arguments.py` from `vllm_omni/engine_arguments/table.py`; do not edit.

Arguments that promise memory, speed, precision, data or a split that would not come are **refused** at start, with one
line that says what to do instead (given here after the word). That holds for `vllm serve --omni`, plain `vllm serve`
and `LLM(...)`. A value equal to vLLM's default is never refused. The table lists the refused arguments and those that
have another effect than vLLM documents. All other arguments of vLLM's engine work as documented, or set something that
does not exist here (no effect), for example how tokens are sampled.

The diffusion worker serves worlds, streams and video models; the diffusers executor serves diffusers pipelines without
a worker; the AR worker runs vLLM's own model runner and honours everything but what its column names.

| argument | diffusion worker | diffusers executor | AR worker |
|---|---|---|---|
"""  # noqa: E501


def render() -> str:
    return HEAD + "".join(_line(row) for row in ROWS)


def _line(row: ArgumentGroup) -> str:
    flags = ", ".join(f"`{argument.flag}`" for argument in row.arguments())
    since = "" if row.since == "0.32" else f" (vLLM {row.since})"
    diffusers = "the same" if row.diffusers is None else _cell(row.diffusers)
    return f"| {flags}{since} | {_cell(row.diffusion)} | {diffusers} | {_cell(row.ar)} |\n"


def _cell(verdict: ArgumentVerdict) -> str:
    kind = "**refused**" if verdict.kind == "refused" else verdict.kind
    but = (
        f" (but {', '.join(_spelled(value) for value in verdict.unless)})" if verdict.unless else ""
    )
    return f"{kind}{but}: {verdict.why}" if verdict.why else kind


def _spelled(value: object) -> str:
    return "off" if value is False else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(render())
