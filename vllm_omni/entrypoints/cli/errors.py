# SPDX-License-Identifier: Apache-2.0
"""Exception of subcommands for problems that the user can fix.

`main` prints it and exits with status 2.
"""


class CommandError(Exception):
    """A one-line message: the received value, the allowed values and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
