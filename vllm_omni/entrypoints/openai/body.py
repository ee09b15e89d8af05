# SPDX-License-Identifier: Apache-2.0
"""Read request bodies for the OpenAI routes. A body is JSON or a form, and its size is limited.

All form values are strings. If a field expects an object or a list, a value that looks like JSON is
parsed as JSON. The `openai` client splits an object into several form fields
(`extra_params[step_ms]=5`), and this module merges them.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Message

from vllm_omni.entrypoints.errors import ApiError, invalid
from vllm_omni.entrypoints.json_values import MAX_JSON_VALUES, has_too_many_values

_MAX_FILES: Final = 20
_MAX_FIELDS: Final = 200
_MAX_FIELD_BYTES: Final = 1 << 20
_DROPPED_BYTES: Final = 1 << 20
"""Number of bytes beyond the size limit that are read and dropped. If the server closed the
connection while a client was still sending its body, the client could not read the reply.
"""
_STRUCTURED: Final = frozenset(
    {"extra_params", "camera_actions", "prompts", "actions", "lora", "input_reference", "images"}
)
_BRACKETED: Final = re.compile(r"([a-z_]+)\[([A-Za-z0-9_]{1,64})\]")


@dataclass(frozen=True)
class ParsedBody:
    """A parsed request body."""

    fields: dict[str, Any]
    """Values by parameter name. If the body is a form, values are strings, except in fields that
    expect an object or a list.
    """
    files: dict[str, list[bytes]] = field(default_factory=dict)
    """Contents of the uploaded files by field name, in upload order."""
    is_form: bool = False
    """Whether the body is a form. Default: False."""


async def read_body(request: Request, max_bytes: int) -> ParsedBody:
    """Read and parse a request body.

    Raises:
        ApiError: Status 400, 413 or 415 if the body is invalid, too large or of an unsupported
            type, respectively.
    """
    content_type = (
        request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    )
    data = await read_bytes(request, max_bytes)
    if content_type in ("multipart/form-data", "application/x-www-form-urlencoded"):
        return await _read_form(request, data)
    if content_type == "application/json":
        return ParsedBody(_read_json(data))
    raise ApiError(
        415,
        "Content-Type must be application/json or multipart/form-data",
        code="unsupported_media_type",
    )


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Read a request body without parsing it.

    Raises:
        ApiError: Status 413 if the body is larger than `max_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes + _DROPPED_BYTES:
        raise _too_large(max_bytes)
    data, num_bytes = bytearray(), 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes + _DROPPED_BYTES:
            break
        if num_bytes <= max_bytes:
            data += part
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return bytes(data)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the request body is larger than {max_bytes} bytes", code="body_too_large"
    )


def _read_json(data: bytes) -> dict[str, Any]:
    if has_too_many_values(data):
        raise invalid(f"the body has more than {MAX_JSON_VALUES} values", code="invalid_json")
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return fields


async def _read_form(request: Request, data: bytes) -> ParsedBody:
    async def replay() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    fields: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    try:
        replayed = Request(request.scope, replay)
        async with replayed.form(
            max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
        ) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    files.setdefault(name.removesuffix("[]"), []).append(await value.read())
                else:
                    _add_field(fields, name, value)
    except (
        HTTPException,
        MultiPartException,
        UnicodeDecodeError,
        ValueError,
        KeyError,
        AttributeError,
    ):
        # python-multipart and starlette raise these for bodies with invalid boundaries
        raise invalid(
            f"the form cannot be read; at most {_MAX_FILES} files and {_MAX_FIELDS} fields",
            code="invalid_form",
        ) from None
    return ParsedBody(fields, files, is_form=True)


def _add_field(fields: dict[str, Any], name: str, value: str) -> None:
    bracketed = _BRACKETED.fullmatch(name)
    if bracketed is not None and bracketed[1] in _STRUCTURED:
        inner = fields.setdefault(bracketed[1], {})
        if isinstance(inner, dict):
            inner[bracketed[2]] = _number_or_text(value)
            return
    if name in _STRUCTURED and value[:1] in ("{", "["):
        try:
            fields[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"{name} is not valid JSON", name, "invalid_json") from None
    else:
        fields[name] = value


def _number_or_text(value: str) -> Any:
    """If possible, parse the value of a bracketed form field as JSON.

    A form does not distinguish the number `5` from the text `5`. To mark a value as text, a client
    can send it as a quoted JSON string.
    """
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return value
