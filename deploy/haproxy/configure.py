# SPDX-License-Identifier: Apache-2.0
"""Write an HAProxy configuration for your servers, based on the `haproxy.cfg` next to this script.

    python3 deploy/haproxy/configure.py a=127.0.0.1:8001 b=127.0.0.1:8002 > /etc/haproxy/haproxy.cfg

Each argument consists of a server's `omni.server_name` and address. The script uses only Python's
standard library.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

TEMPLATE = Path(__file__).with_name("haproxy.cfg")
_SERVER = re.compile(r"(?P<name>[A-Za-z0-9-]{1,63})=(?P<address>[^\s=]+:\d+)")
_EXAMPLE = re.compile(r"^    server a \S+(?P<options>.*)\n    server b .*\n", re.M)
_RULE = re.compile(
    r"^(?P<line>    http-request .*servers/a\) }\n)    http-request .*servers/b\) }\n", re.M
)
_NAME_IN_RULE = re.compile(r"(?<=servers/)a\b|(?<=str\()a\b|(?<=-m str )a\b")


def configure(template: str, servers: Mapping[str, str], options: str = "") -> str:
    """Return the HAProxy configuration for the given servers.

    Args:
        template: Contents of `haproxy.cfg`.
        servers: Address (`host:port`) of each server, by name.
        options: HAProxy options that apply to all servers, for example `resolvers cluster`.
    """

    def lines(example: re.Match[str]) -> str:
        return "".join(
            " ".join(
                [
                    "    server",
                    name,
                    address,
                    *example["options"].replace("servers/a", f"servers/{name}").split(),
                    *options.split(),
                ]
            )
            + "\n"
            for name, address in servers.items()
        )

    def rules(example: re.Match[str]) -> str:
        return "".join(_NAME_IN_RULE.sub(name, example["line"]) for name in servers)

    text, count = _EXAMPLE.subn(lines, template)
    text, num_rules = _RULE.subn(rules, text)
    names = "acl is_known_server var(txn.server) -m str"
    if count != 2 or num_rules != 2 or f"{names} a b\n" not in text:
        raise ValueError("the template has no longer the servers a and b in five places")
    return text.replace(f"{names} a b\n", f"{names} {' '.join(servers)}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=HOST:PORT")
    parser.add_argument(
        "--server-options", default="", help='of every server, such as "resolvers cluster"'
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    servers: dict[str, str] = {}
    for text in args.servers:
        match = _SERVER.fullmatch(text)
        if match is None or match["name"] in servers:
            parser.error(f"{text}: give a name and an address once, such as a=127.0.0.1:8001")
        servers[match["name"]] = match["address"]
    sys.stdout.write(configure(TEMPLATE.read_text(), servers, args.server_options))


if __name__ == "__main__":
    main()
