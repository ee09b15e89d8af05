# SPDX-License-Identifier: Apache-2.0
"""The file that lists a fleet's servers, and the operator's key."""

from pathlib import Path

import pytest

from vllm_omni.entrypoints.fleet.servers import KEY_VARIABLE, Fleet

FILE = """
[servers.a]
url = "http://10.0.0.1:8000/"
[servers.b]
url = "http://10.0.0.2:8000"
public_url = "https://b.example.com"
"""
KEY = "a-key-of-the-operator"


def read(folder: Path, text: str = FILE, name: str | None = "a", key: str | None = KEY) -> Fleet:
    path = folder / "fleet.toml"
    path.write_text(text)
    return Fleet.read(str(path), name, {} if key is None else {KEY_VARIABLE: key})


def test_the_other_servers_are_found_by_name_or_address(tmp_path: Path) -> None:
    fleet = read(tmp_path)
    for known in ("b", "http://10.0.0.2:8000", "http://10.0.0.2:8000/"):
        found = fleet.find(known)
        assert found is not None
        assert (found[0], found[1].public_url) == ("b", "https://b.example.com")
    for unknown in ("a", "c", "http://10.0.0.1:8000", "https://b.example.com", ""):
        assert fleet.find(unknown) is None, unknown


@pytest.mark.parametrize(
    ("text", "name", "key", "said"),
    [
        (FILE, "a", None, "requires the variable VLLM_OMNI_OPERATOR_KEY"),
        (FILE, "a", "short", "at least 16"),
        (FILE, "a", "ä" * 20, "ASCII"),
        (FILE, "c", KEY, "not this server"),
        (FILE, None, KEY, "not this server"),
        ("[servers", "a", KEY, "fleet.toml"),
        ('[servers.a]\nurl = "ftp://x"', "a", KEY, "fleet.toml"),
        ('[servers.a]\nurl = "http://x?y"', "a", KEY, "fleet.toml"),
        ('[servers.a]\nurl = "http://x"\nurls = 1', "a", KEY, "fleet.toml"),
        ('[servers."a b"]\nurl = "http://x"', "a b", KEY, "fleet.toml"),
    ],
)
def test_an_invalid_file_or_key_ends_the_start(
    tmp_path: Path, text: str, name: str | None, key: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read(tmp_path, text, name, key)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml"):
        Fleet.read(str(tmp_path / "none.toml"), "a", {KEY_VARIABLE: KEY})


def test_only_the_operators_key_is_accepted(tmp_path: Path) -> None:
    fleet = read(tmp_path)
    assert fleet.is_operator(f"Bearer {KEY}")
    for wrong in ("", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", "Bearer \udcff"):
        assert not fleet.is_operator(wrong), wrong
    nobody = Fleet.read(None, None, {})
    assert not nobody.is_operator("Bearer ")
    assert nobody.others == {}
