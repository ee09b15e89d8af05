# SPDX-License-Identifier: Apache-2.0
"""Find names in back quotes that do not exist in this package, its tests and tools, or vLLM.

A name exists if code defines it, uses it or contains it as a string. Docstrings and comments do not
count.
"""

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
FOLDERS = ("vllm_omni", "tests", "benchmarks", "deploy", "examples", "scripts")
_QUOTED = re.compile(r"(?<![`\w])`([^`\n]+)`(?!`)")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
_PATH = re.compile(
    r"(?:\.\./|[\w.-]+/)*[\w.-]*\.(?:py|md|json|js|svg|toml)|(?:\.\./)?(?:[\w.-]+/)+"
)
FENCE = re.compile(r"^([ ]*)(`{3,}).*?^\1\2[ ]*$", re.M | re.S)


def quoted(text: str) -> list[str]:
    """Return the names and paths in back quotes outside fenced blocks, without duplicates.

    Other quoted text, such as commands and values, is ignored.
    """
    found = (name.strip() for name in _QUOTED.findall(FENCE.sub("", text)))
    return list(
        dict.fromkeys(name for name in found if _NAME.fullmatch(name) or _PATH.fullmatch(name))
    )


def docstrings(tree: ast.Module) -> str:
    """Return all docstrings of a module, including those of fields and constants."""
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    texts = (node.value for node in found if isinstance(node, ast.Constant))
    return "\n\n".join(inspect.cleandoc(text) for text in texts if isinstance(text, str))


def missing(names: list[str], alongside: Path, private: frozenset[str] = frozenset()) -> list[str]:
    """Return the names that do not exist.

    A path is relative to the repository, the package, or `alongside`, the folder of the page. A
    private name must be qualified by its class, because many classes have a `_close`. The
    exceptions are the names in `private`, which are defined in the same module as the docstring.
    """
    return [name for name in names if name not in private and not _exists(name, alongside)]


def _exists(name: str, alongside: Path) -> bool:
    if _PATH.fullmatch(name):
        return _path_exists(name, alongside)
    parts = name.removesuffix("()").split(".")
    if parts[0] == "vllm_omni" and len(parts) > 1:
        return _in_module(parts)
    if len(parts) == 2 and parts[0] == "omni":
        return parts[1] in _members("OmniConfig")
    if len(parts) == 2 and parts[0] in _classes():
        return parts[1] in _members(parts[0])
    if len(parts) == 1 and re.match(r"_(?!_)", parts[0]):
        return False
    return all(_word_exists(part) for part in parts)


def _word_exists(word: str) -> bool:
    """Return whether a word exists.

    A word may also be the name of a counter, or the environment variable for a limit, for example
    `VLLM_OMNI_IDLE_TIMEOUT_S` for `idle_timeout_s`.
    """
    variable = word.removeprefix("VLLM_OMNI_").lower() if word.isupper() else word
    return any(
        each in _ours() or each in _of_vllm()
        for each in (word, variable, word.removesuffix("_total"))
    )


def _path_exists(name: str, alongside: Path) -> bool:
    if any(
        (root / name).exists()
        for root in (alongside, REPO, REPO / "vllm_omni", REPO / "vllm_omni" / "model_executor")
    ):
        return True
    if any(path.as_posix().endswith("/" + name.rstrip("/")) for path in _files()):
        return True
    return name.rstrip("/") in _strings()  # for example a file of a checkpoint


@cache
def _files() -> list[Path]:
    found = [
        path
        for folder in FOLDERS
        for path in (REPO / folder).rglob("*")
        if "__pycache__" not in path.parts
    ]
    return [*found, *(REPO / "docs").rglob("*")]


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the parsed modules of the package and its tools. Tests are not included; `_of_tests`
    returns the names that they define.
    """
    return {
        path: ast.parse(path.read_text())
        for path in _files()
        if path.suffix == ".py" and not _is_a_test(path)
    }


def _is_a_test(path: Path) -> bool:
    return path.is_relative_to(REPO / "tests")


def _of_tests() -> Iterator[str]:
    """Return the names of the functions in the tests. A regular expression finds them, because
    parsing all tests would take seconds.
    """
    for path in _files():
        if path.suffix == ".py" and _is_a_test(path):
            yield from re.findall(r"^ *def (\w+)", path.read_text(), re.M)


def _strings_of(tree: ast.AST) -> Iterator[str]:
    """Return the string literals of a module, except docstrings and field docstrings."""
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            yield node.value


def names_of(tree: ast.AST) -> Iterator[str]:
    """Return the names that code defines or uses, and the words of its strings."""
    for text in _strings_of(tree):
        yield from re.findall(r"\w+", text)
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str() as name):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")


@cache
def _ours() -> frozenset[str]:
    ours = {name for tree in trees().values() for name in names_of(tree)} | set(_of_tests())
    scripts = (path.read_text() for path in _files() if path.suffix in (".js", ".cfg", ".yaml"))
    return frozenset(
        ours
        | {word for text in scripts for word in re.findall(r"\w+", text)}
        | {p.stem for p in _files()}
    )


@cache
def _strings() -> str:
    """Return the string literals of the package's code, except docstrings."""
    package = [tree for path, tree in trees().items() if path.is_relative_to(REPO / "vllm_omni")]
    return "\n".join(text for tree in package for text in _strings_of(tree))


@cache
def _classes() -> dict[str, tuple[set[str], list[str]]]:
    """Map each class of this package to its own members and the names of its base classes."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path, tree in trees().items():
        if path.is_relative_to(REPO / "vllm_omni"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    members, bases = found.setdefault(node.name, (set(), []))
                    members.update(_members_of(node))
                    bases += [name for base in node.bases for name in names_of(base)]
    return found


def _members_of(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name


def _members(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    members, bases = _classes()[name]
    inherited = (
        _members(base, seen | {name}) for base in bases if base in _classes() and base not in seen
    )
    return members.union(*inherited)


def _in_module(parts: list[str]) -> bool:
    """Return whether `vllm_omni.a.b.c` is a module or a name that a module defines or imports."""
    path = REPO.joinpath(*parts)
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    for module in (path.parent.with_suffix(".py"), path.parent / "__init__.py"):
        if module.is_file():
            return parts[-1] in set(names_of(trees()[module]))
    return len(parts) > 2 and parts[-2] in _classes() and parts[-1] in _members(parts[-2])


@cache
def _of_vllm() -> frozenset[str]:
    """Return all words of vLLM's source (40 MB). The source is read as bytes, which takes a third
    as long as reading it as text.
    """
    [root] = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    apart = re.sub(rb"\W", b" ", bytes(range(256)))
    words = {
        word
        for path in Path(root).rglob("*.py")
        for word in path.read_bytes().translate(apart).split()
    }
    return frozenset(map(bytes.decode, words))
