# SPDX-License-Identifier: Apache-2.0
"""The pieces of a family's checkpoint, and the places of its released weights on the Hugging Face
hub.

A family that has released weights defines, in `models/<name>/hub.py`, `PIECES` (files to fetch, and
their place in the checkpoint directory), `check_complete(path)` (names, within a second, the files
that a directory lacks) and, where repositories leave files out, `complete(out)`, which writes them.
With several releases, `RELEASES` names the others; their names are the family's aliases in
`models/registry.py`. `vllm-omni download` and `vllm serve --omni` use them; this file names no
model. `resolve` finds the snapshot of a hub id, as vLLM does for the models that it loads.
Held by tests/entrypoints/cli/test_download.py and test_hub_ids.py.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODELS = "vllm_omni.model_executor.models"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = ("*.json",)
"""Files by which a repository is recognised before its weights are fetched."""
_NOT_SERVED = (
    "original/**/*",
    "*.onnx",
    "*.onnx_data",
    "*.msgpack",
    "*.h5",
    "*.ot",
    "*.gguf",
    "*.md",
    "*.mp4",
    "*.gif",
)
"""Other formats, and pictures of model cards."""


@dataclass(frozen=True)
class HubComponent:
    """One repository's share of a checkpoint.

    patterns: file names to take, as globs from the repository's root. folder: where they go below
    the checkpoint directory ("" = the directory itself). gigabytes: their size, for the plan and
    the disk check.
    """

    repo: str
    patterns: tuple[str, ...]
    folder: str
    gigabytes: float


def _complete_as_fetched(out: Path) -> list[str]:
    return []


@dataclass(frozen=True)
class HubSource:
    """All pieces of one checkpoint, and its last step; `complete` returns the names of the files it
    wrote.

    licence: of the weights, in one line, if it must be accepted before anything is fetched; None =
    its card tells.
    """

    components: tuple[HubComponent, ...]
    complete: Callable[[Path], list[str]] = _complete_as_fetched
    licence: str | None = None

    @property
    def gigabytes(self) -> float:
        return sum(part.gigabytes for part in self.components)


def hub_source(family_name: str, release: str | None = None) -> HubSource:
    """Return the source of a family's weights, by the name of one of its releases if it has
    several.

    Raises ValueError when there are none to fetch.
    """
    module = _hub_module(family_name)
    releases: dict[str, HubSource] = {} if module is None else vars(module).get("RELEASES", {})
    if release in releases:
        return releases[release]
    if module is None or not module.PIECES:
        raise ValueError(
            f"{family_name} has no released weights; `vllm-omni make-tiny {family_name} DIR` "
            "writes small random ones"
        )
    return HubSource(module.PIECES, vars(module).get("complete", _complete_as_fetched))


def is_hub_id(model: str) -> bool:
    """Whether a model argument names a repository of the hub: `owner/name`, and no path that
    exists.
    """
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def resolve(
    repo: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """Return the directory of a hub repository's snapshot in the cache, after fetching the files
    that it lacks.

    Hugging Face's variables apply (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`). A
    repository of no known release is recognised by its small files before its weights are fetched.

    Args:
        repo: `owner/name`.
        revision: Branch, tag or commit. Default: the main branch.
        cache_dir: Cache directory. Default: Hugging Face's own.
        token: Access token. Default: the stored one.

    Raises:
        ValueError: The repository is a part of a checkpoint only, holds no model of this package,
            restricts its use, or cannot be fetched. One line.
    """
    where = {"revision": revision, "cache_dir": cache_dir, "token": token}
    source = _release_of(repo)
    if source is not None:
        name, release = source
        if (
            any(part.repo != repo or part.folder for part in release.components)
            or release.licence is not None
        ):
            reason = (
                f"has weights under a licence to be accepted ({release.licence})"
                if release.licence is not None
                else "holds a part of a checkpoint"
            )
            raise ValueError(
                f"{repo} {reason}: run `vllm-omni download {name} DIR`, then `vllm serve "
                "DIR --omni`"
            )
        return fetch(
            repo, [pattern for part in release.components for pattern in part.patterns], **where
        )
    from vllm_omni.model_executor.models.registry import detect_family

    small = fetch(repo, _SMALL, **where)
    try:
        detect_family(small)
    except ValueError as error:
        raise ValueError(
            f"{repo} is not recognised as a model of this package by its .json files; its weights "
            "were not fetched. If "
            f"it is one: `hf download {repo} --local-dir DIR`, then `vllm serve DIR --omni`"
        ) from error
    return fetch(repo, None, ignore_patterns=_NOT_SERVED, **where)


def fetch(repo: str, patterns: Sequence[str] | None, **options: Any) -> Path:
    """Fetch the files of a repository that match and are not there yet; return their directory.

    options: of `huggingface_hub.snapshot_download`. Raises ValueError in one line when the hub
    refuses or cannot be reached.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    allowed = None if patterns is None else list(patterns)
    try:
        return Path(snapshot_download(repo, allow_patterns=allowed, **options))
    except GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then `hf auth "
            "login` and try again"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the hub has no repository {repo}, or your token may not read it"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(
            f"{repo} could not be fetched ({type(error).__name__}: {first})"
        ) from error


def _release_of(repo: str) -> tuple[str, HubSource] | None:
    """The download name and source of the release that has a piece in `repo`; of several, one
    that needs it alone.
    """
    from vllm_omni.model_executor.models.registry import known_names

    found = []
    for name, family in known_names().items():
        try:
            source = hub_source(family, name)
        except ValueError:
            continue
        if any(item.repo == repo for item in source.components):
            found.append((name, source))
    return min(
        found, key=lambda each: len({part.repo for part in each[1].components}), default=None
    )


def check_complete(family_name: str, path: Path) -> None:
    """Raise ValueError of one line if a checkpoint directory lacks a piece; cheap, reads no
    weights.
    """
    module = _hub_module(family_name)
    if module is not None:
        module.check_complete(path)


def _hub_module(family_name: str) -> Any:
    """The family's `hub` module, or None if it has none."""
    package = f"{_MODELS}.{family_name}"
    try:
        return importlib.import_module(f"{package}.hub")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.hub"):
            raise
        return None
