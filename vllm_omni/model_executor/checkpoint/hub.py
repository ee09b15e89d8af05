# SPDX-License-Identifier: Apache-2.0
"""Model families' released weights on the Hugging Face Hub.

A family with released weights has a module `models/<name>/hub.py`. The module defines `PIECES`, the
files to download and their locations in the checkpoint directory. It also defines
`check_complete(path)`, which raises an error if files are missing and does not read weights. The
optional function `complete(out)` writes the checkpoint files that no repository contains.
`RELEASES` defines additional releases by name. A release's name is an alias for its family in
`models/registry.py`. `vllm-omni download` and `vllm serve --omni` read these modules. `resolve`
finds the snapshot for a hub id, as vLLM does for the models that it supports natively.
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
"""Globs for the small files that are downloaded first to detect which model a repository contains.
"""
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
"""Globs for files that are not downloaded: files in unsupported formats, and model cards with their
images and videos.
"""


@dataclass(frozen=True)
class HubComponent:
    """A checkpoint's files that come from one repository."""

    repo: str
    """Repository that contains the files, as `owner/name`."""
    patterns: tuple[str, ...]
    """Globs for the files to fetch, relative to the repository root."""
    folder: str
    """Target directory within the checkpoint directory; "" is the checkpoint directory itself."""
    gigabytes: float
    """Size of the files in GB. The size is shown in the download plan and compared with the free
    disk space.
    """


def _complete_as_fetched(out: Path) -> list[str]:
    return []


@dataclass(frozen=True)
class HubSource:
    """All files to download for one checkpoint."""

    components: tuple[HubComponent, ...]
    """The checkpoint's files, grouped by repository."""
    complete: Callable[[Path], list[str]] = _complete_as_fetched
    """Function that writes the checkpoint files that no repository contains, and returns the names
    of the files written.
    """
    licence: str | None = None
    """One-line description of the weights' licence. None: the user need not accept a licence before
    the download.
    """

    @property
    def gigabytes(self) -> float:
        return sum(part.gigabytes for part in self.components)


def hub_source(family_name: str, release: str | None = None) -> HubSource:
    """Return the source from which to download a family's weights.

    Args:
        family_name: Family name.
        release: Name of a release. Default: the family's first release.

    Raises:
        ValueError: The family has no released weights.
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
    """Whether a model argument is a repository id (`owner/name`) rather than an existing path."""
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def resolve(
    repo: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """Download a repository's missing files, and return the directory of its snapshot in the cache.

    Hugging Face's environment variables apply (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`,
    `HF_HUB_OFFLINE`). If the repository is not a known release, its small files are downloaded
    first to detect the model.

    Args:
        repo: Repository, as `owner/name`.
        revision: Branch, tag or commit. Default: the main branch.
        cache_dir: Cache directory. Default: Hugging Face's own cache directory.
        token: Access token. Default: the stored token.

    Raises:
        ValueError: The repository contains only part of a checkpoint, requires acceptance of a
            licence, contains no model that this package supports, or cannot be downloaded. The
            error message is a single line.
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
    """Download a repository's missing files, and return their directory.

    Args:
        repo: Repository, as `owner/name`.
        patterns: Globs for the files to download. None: all files.
        **options: Arguments for `huggingface_hub.snapshot_download`.

    Raises:
        ValueError: The hub refuses the download or cannot be reached. The error message is a single
            line.
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
    """Return the name and source of a release that has files in a repository.

    If several releases have files in the repository, one that needs no other repository is
    preferred. The result is None if no release has files in the repository.
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
    """Check that a checkpoint directory has all its files, without reading weights.

    Raises:
        ValueError: A file is missing. The error message is a single line.
    """
    module = _hub_module(family_name)
    if module is not None:
        module.check_complete(path)


def _hub_module(family_name: str) -> Any:
    """Return a family's `hub` module, or None if the family has no such module."""
    package = f"{_MODELS}.{family_name}"
    try:
        return importlib.import_module(f"{package}.hub")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.hub"):
            raise
        return None
