# SPDX-License-Identifier: Apache-2.0
"""The shipped village's tokenizer: small, but real, with the files, special tokens and byte
fallback of umt5-xxl's.

sentencepiece 0.2.3 trained it on twenty sentences. It is copied and not trained again: another
version trains another vocabulary, and so other prompts, and a random checkpoint of one seed would
not be the same everywhere.
"""

import json
import shutil
from pathlib import Path

from vllm_omni import worlds

_VILLAGES = Path(worlds.__file__).parent / "village" / "google" / "umt5-xxl"
_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def write_tokenizer(folder: Path) -> int:
    """Write `spiece.model`, `tokenizer.json` and their two config files; returns the number of
    tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(_VILLAGES / name, folder / name)
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
