# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the demo world: small, with the files, special tokens and byte fallback of
umt5-xxl's.

It was trained on twenty sentences with sentencepiece 0.2.3. It is copied, not trained again,
because other versions train another vocabulary, and random checkpoints of one seed would differ.
"""

import json
import shutil
from pathlib import Path

from vllm_omni import worlds

_VILLAGES = Path(worlds.__file__).parent / "village" / "google" / "umt5-xxl"
_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def write_tokenizer(folder: Path) -> int:
    """Write `spiece.model`, `tokenizer.json` and their configs, and return the number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(_VILLAGES / name, folder / name)
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
