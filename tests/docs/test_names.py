# SPDX-License-Identifier: Apache-2.0
"""Back-quoted names in pages and in the package's docstrings exist."""

import argparse
import re
from functools import cache
from pathlib import Path

import names
import pytest
import snippets as docs

from vllm_omni.engine_arguments.table import KNOWN_FIELDS
from vllm_omni.entrypoints.cli.main import make_parser
from vllm_omni.entrypoints.cli.serve import serve_parser

pytestmark = pytest.mark.source

ELSEWHERE = {
    "HF_HOME": "an environment variable of huggingface_hub",
    "HF_TOKEN": "an environment variable of huggingface_hub",
    "vae/config.json": "a file of a checkpoint",
    "FORWARDED_ALLOW_IPS": "an environment variable of uvicorn",
    "last_image": "an argument of diffusers' pipelines",
    "control_image": "an argument of diffusers' pipelines",
    "pooled_prompt_embeds": "an argument of diffusers' pipelines",
    "QwenImageImg2ImgPipeline": "of diffusers",
    "QwenImageInpaintPipeline": "of diffusers",
    "moof": "a part of an MP4 file",
    "image_2": "an example of the names that are counted up",
    "_flash_3": "an attention backend's name in diffusers",
    "PretrainedConfig": "of transformers",
    "pipeline_qwenimage.py": "of diffusers",
    "_get_qwen_prompt_embeds": "of diffusers",
    "numpy_to_pil": "of diffusers",
    "torchvision/extension.py": "of torchvision",
    "models/qwen2_5_omni/modeling_qwen2_5_omni.py": "of transformers",
    "MediaSource.addSourceBuffer": "of browsers",
    "sun_path": "a field of a C struct",
    "positive_magic": "a variable of the Qwen-Image code",
    "Esc": "a key",
    "terminationGracePeriodSeconds": "of Kubernetes",
    "ticket.XXX": "an example",
    ".try_vllm/": "made by scripts/try_vllm.py",
    "Worker._make_model_runner": "of vLLM's gpu_worker; this package has an enum of the same name",
    "vllm_omni/model_executor/models/checkers/": "written by the reader of the tutorial",
    "_hf_config": "written by the reader of the tutorial",
    "VOMN": "the first bytes of an envelope",
    "rank0.kv.frame3": "an example: names in a snapshot are put together",
}
"""Names that belong neither to this package nor to vLLM, with their origin."""

PAGES = docs.documents()
MODULES = sorted((docs.REPO / "vllm_omni").rglob("*.py"))


def unknown(text: str, alongside: Path, private: frozenset[str] = frozenset()) -> list[str]:
    return [
        name
        for name in names.missing(names.quoted(text), alongside, private)
        if name not in ELSEWHERE
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(docs.REPO)),
)
def test_names_in_a_page_exist(path: Path) -> None:
    """Every class, function, option, environment variable, error code and file named in a page
    exists.

    The changelog is excluded, because it may describe earlier versions.
    """
    assert unknown(path.read_text(), path.parent) == []


def test_names_in_docstrings_exist() -> None:
    """Every back-quoted name in the package's docstrings exists."""
    found = {}
    for path in MODULES:
        tree = names.trees()[path]
        private = frozenset(name for name in names.names_of(tree) if name.startswith("_"))
        if wrong := unknown(names.docstrings(tree), path.parent, private):
            found[str(path.relative_to(docs.REPO))] = wrong
    assert found == {}


def test_every_name_in_elsewhere_is_still_used() -> None:
    """Every name in `ELSEWHERE` is still in use, so the list contains no obsolete entry."""
    written = {name for path in PAGES for name in names.quoted(path.read_text())}
    written |= {
        name for path in MODULES for name in names.quoted(names.docstrings(names.trees()[path]))
    }
    assert set(ELSEWHERE) - written == set()


@cache
def flags() -> frozenset[str]:
    """Return the command-line options of all programs that the pages mention.

    The programs are `vllm serve` with and without `--omni`, `vllm-omni`, this repository's scripts,
    pip, uv, Ray, Docker, kubectl and pytest.
    """
    parsers: list[argparse.ArgumentParser] = [serve_parser(), docs._stock_parser(), make_parser()]
    found = {
        "--extra-index-url",
        "--head",
        "--port",
        "--address",
        "--block",
        "--num-gpus",
        "--shm-size",
    }
    found |= {"--rm", "--gpus", "--dist", "--durations", "--store-durations"}
    found |= {"--from-file", "--from-literal"}
    found |= {"--mode", "--dimension"}  # options of VBench
    found |= {"--torch-backend", "--find-links"}  # options of uv and pip
    # vLLM's arguments in all supported versions
    found |= {"--" + name.strip("_").replace("_", "-") for name in KNOWN_FIELDS}
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action.choices, dict):
                parsers += [
                    each
                    for each in action.choices.values()
                    if isinstance(each, argparse.ArgumentParser)
                ]
    folders = [
        docs.REPO / folder
        for folder in ("benchmarks", "deploy", "examples", "scripts", "tests", "training")
    ]
    scripts = (
        path for folder in folders for path in folder.rglob("*.py") if path != Path(__file__)
    )
    return frozenset(
        found.union(*(re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text()) for path in scripts))
    )


def unknown_flags(text: str) -> list[str]:
    text = re.sub(r"^```text$.*?^```$", "", text, flags=re.M | re.S)  # diagrams contain dashes
    found = re.findall(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])", text)
    return [flag for flag in found if flag not in flags()]


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(docs.REPO)),
)
def test_flags_in_a_page_exist(path: Path) -> None:
    """Command-line options named in a page exist, including those in sentences and tables, where no
    command is parsed.
    """
    assert unknown_flags(path.read_text()) == []
