# SPDX-License-Identifier: Apache-2.0
"""The exception that subcommands raise for problems that the user can fix.

`main` prints the exception's message and exits with status 2.
"""


class CommandError(Exception):
    """Error with a one-line message that states the received value, the allowed values and the
    remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
