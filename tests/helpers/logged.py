# SPDX-License-Identifier: Apache-2.0
"""Records a logger's messages.

`caplog` would miss messages logged after vLLM has configured its loggers again.
"""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(logger: logging.Logger, from_level: int = logging.INFO) -> Iterator[list[str]]:
    """Yield a list of the messages logged during the block at the given level or above."""
    found: list[str] = []

    class Found(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, level = Found(), logger.level
    logger.addHandler(handler)
    logger.setLevel(from_level)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
