# SPDX-License-Identifier: Apache-2.0
"""The one exception a subcommand raises for anything the user can mend; `main` prints it as one line and exits 2."""


class CommandError(Exception):
    """One line: the value received, the values allowed, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
