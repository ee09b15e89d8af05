# SPDX-License-Identifier: Apache-2.0
"""Receive snapshots in HTTP request bodies. A body is streamed to a file and never held in
memory.
"""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Final

from fastapi import Request

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.session_files.snapshot import LENGTH_BYTES, check_length

PART_BYTES: Final = 4 << 20
_HEADER_BYTES: Final = 16 << 20
"""Maximum size in bytes of everything in a snapshot except its tensors."""


async def max_snapshot_bytes(server: ServerContext) -> int | None:
    """Return the maximum size in bytes of a snapshot of this server's sessions, or None if the size
    is not limited.
    """
    (stats, *_) = await server.engine.session_stats()
    if stats["max_bytes"] is None:
        return None
    world_size: int = server.client.vllm_config.parallel_config.world_size
    return int(stats["max_bytes"]) * world_size + _HEADER_BYTES


async def receive_snapshot(request: Request, path: Path, max_bytes: int | None) -> str:
    """Stream a request body to a new file. `BodyTimeout` limits how long the transfer may take.

    Args:
        request: The request.
        path: File to create.
        max_bytes: Maximum size of the body in bytes. None: no limit.

    Returns:
        SHA-256 digest of the body, in hexadecimal.

    Raises:
        EndpointError: The body is too large.
        RequestFailed: The snapshot header is too long. Its length is checked before the rest of the
            body arrives.
    """
    total, held, is_checked, digest = 0, bytearray(), False, hashlib.sha256()

    def write(part: bytes) -> None:
        digest.update(part)
        file.write(part)

    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        stream = aiter(request.stream())
        while True:
            part = await anext(stream, None)
            total += len(part or b"")
            if max_bytes is not None and total > max_bytes:
                raise EndpointError(
                    "snapshot_too_large", f"a session of this server has at most {max_bytes} bytes"
                )
            held += part or b""
            if not is_checked and len(held) >= LENGTH_BYTES:
                check_length(int.from_bytes(held[:LENGTH_BYTES], "little"))
                is_checked = True
            if held and (part is None or len(held) >= PART_BYTES):
                await asyncio.to_thread(write, bytes(held))
                held.clear()
            if part is None:
                return digest.hexdigest()
