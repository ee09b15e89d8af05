# SPDX-License-Identifier: Apache-2.0
"""Run a Dockerfile from `deploy` without Docker: build the image in a chroot and start its entry
point.

    sudo python3 scripts/run_dockerfile.py deploy/Dockerfile.cpu FOLDER

The script is for machines that have `debootstrap` and root access but cannot reach an image
registry. The base image `python:VERSION-slim-SUITE` is replaced with the Debian suite and Debian's
Python of that version, in FOLDER/base, which later runs reuse. Each RUN starts in its own mount and
process namespaces with 64 MB of /dev/shm, as under Docker. The entry point then runs as process 1
in its own network namespace, as the image's user and without capabilities, until the health check
passes. `/omni/ready` must respond, a request with the API key must generate a video from a start
image of the served world, and after SIGTERM the server must exit with status 0. With
`--build-only`, the script stops before starting the entry point, for example for Dockerfile.cuda on
a machine without a GPU.

Only the instructions and forms that the Dockerfiles use are implemented. The variables of pip and
uv, and those for proxies and certificates, are passed to the steps. `--bind` makes files of this
machine available to the steps, and `--build-arg` sets an ARG. The script uses only the standard
library, because it runs outside the environment.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
_PASSED = re.compile(r"(PIP|UV|SSL)_\w+|\w+_proxy", re.IGNORECASE)
_PACKAGES = "ca-certificates,python3.11,python3.11-venv,python3-pip"
_SHM = "64m"
_RUN_SHM = "2g"
_READY_S = 600.0
_REPLY_S = 60.0
_VIDEO_S = 300.0
_STOP_S = 60.0
_READY = "import urllib.request as r; print(r.urlopen('{url}/omni/ready').read().decode())"
_VIDEO = """
import base64
from vllm_omni.evaluation.client import EvaluatedServer
server = EvaluatedServer("{url}", "{key}")
start = server.greeting()["world"]["starts"][0]["file"]
image = "data:image/png;base64," + base64.b64encode(server.page_file(start)).decode()
fields = {{"prompt": "a street", "input_reference": {{"image_url": image}}, "num_frames": 21}}
video, job = server.video(fields)
assert video[4:8] == b"ftyp", video[:12]
print("== a video of", job["seconds"], "s,", job["size"], "in", len(video), "bytes", flush=True)
"""
_API_KEY = "change-me"


class StepError(Exception):
    """A step failed, or the Dockerfile contains an instruction that this script does not
    implement.
    """


class Image:
    """The state of a build: the image's files, and the values that ENV, ARG, USER, WORKDIR and
    other instructions have set.
    """

    def __init__(self, root: Path, binds: Sequence[str], build_args: Mapping[str, str]) -> None:
        self.root = root
        self.binds = binds
        self.build_args = build_args
        self.args: dict[str, str] = {}
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.user = "0"
        self.workdir = "/"
        self.last: dict[str, str] = {}

    def apply(self, name: str, rest: str) -> None:
        if name == "RUN":
            self.run(rest)
        elif name == "COPY":
            *sources, target = rest.split()
            self.copy(sources, self.root / self.workdir.lstrip("/") / target)
        elif name == "ENV":
            pairs = (pair.partition("=") for pair in rest.split())
            self.env |= {
                key: string.Template(value).substitute(self.env) for key, _, value in pairs
            }
        elif name == "ARG":
            key, _, default = rest.partition("=")
            self.args[key] = self.build_args.get(key, default)
        elif name == "USER":
            self.user = rest
        elif name == "WORKDIR":
            self.workdir = rest
            (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name in ("EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"):
            self.last[name] = rest
        else:
            raise StepError(f"{name} is not implemented")

    def copy(self, sources: Sequence[str], target: Path) -> None:
        for source in (REPO / name for name in sources):
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(source, target / source.name)

    def run(self, rest: str) -> None:
        shm = _SHM
        if mount := re.match(r"--mount=type=tmpfs,target=/dev/shm ", rest):
            rest, shm = rest[mount.end() :], "50%"
        passed = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
        command = self.command(["/bin/sh", "-c", rest], {**passed, **self.args}, shm)
        if (code := subprocess.run(command, check=False).returncode) != 0:
            raise StepError(f"status {code}: RUN {rest}")

    def command(
        self, argv: Sequence[str], env: Mapping[str, str], shm: str, network: bool = True
    ) -> list[str]:
        """Return a command that runs `argv` in this image, as process 1 of its namespaces."""
        mounts = [
            "mount --rbind /dev $0/dev",
            "mount --rbind /sys $0/sys",  # vLLM runs lscpu to detect the cores
            f"mount -t tmpfs -o mode=1777,size={shm} tmpfs $0/dev/shm",
            "mount -t proc proc $0/proc",
            *(f"mkdir -p $0{path} && mount --rbind {path} $0{path}" for path in self.binds),
            *([] if network else ["ip link set lo up"]),
        ]
        script = " && ".join([*mounts, 'root=$0 && cd / && exec chroot "$root" "$@"'])
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [
            *(*unshare, *([] if network else ["--net"]), "sh", "-c", script, str(self.root)),
            *self.entered(argv, env),
        ]

    def entered(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Build the arguments to append after `chroot ROOT`: they set the user, environment
        variables and working directory, then run `argv`.
        """
        record = next(
            (one for one in self.accounts() if self.user in (one[0], one[2])),
            ["", "", self.user, self.user, "", "/"],
        )
        drop = ["--inh-caps=-all", "--bounding-set=-all"] if record[2] != "0" else []
        user = ["setpriv", f"--reuid={record[2]}", f"--regid={record[3]}", "--clear-groups", *drop]
        variables = {**env, **self.env, "HOME": record[5]}
        return [
            *(*user, "env", "-i", *(f"{name}={value}" for name, value in variables.items())),
            *("sh", "-c", f'cd {self.workdir} && exec "$@"', "sh", *argv),
        ]

    def accounts(self) -> list[list[str]]:
        return [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def make_base(image: str, folder: Path) -> None:
    """Bootstrap a Debian system with the base image's contents at the same paths."""
    if (folder / "etc/image").is_file() and (folder / "etc/image").read_text() == image:
        return
    wanted = re.fullmatch(r"python:3\.11-slim-(bookworm)", image)
    if wanted is None:
        raise StepError(f"no replacement for the base image {image}, only for 3.11 on bookworm")
    shutil.rmtree(folder, ignore_errors=True)
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", wanted[1], folder]
    subprocess.run(bootstrap, check=True, stdout=subprocess.DEVNULL)
    (folder / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3.11")
    (folder / "etc/image").write_text(image)


def build(path: Path, folder: Path, binds: Sequence[str], build_args: Mapping[str, str]) -> Image:
    """Run the instructions of a Dockerfile on a copy of its base image."""
    image = Image(folder / "root", binds, build_args)
    for name, rest in instructions(path):
        started = time.monotonic()
        print(f"== {name} {rest}", flush=True)
        if name == "FROM":
            make_base(rest, folder / "base")
            shutil.rmtree(image.root, ignore_errors=True)
            subprocess.run(["cp", "-a", folder / "base", image.root], check=True)
            shutil.copy("/etc/resolv.conf", image.root / "etc/resolv.conf")
        else:
            image.apply(name, rest)
        print(f"   {time.monotonic() - started:.0f} s", flush=True)
    return image


def serve(image: Image) -> None:
    """Start the entry point, wait for the health check, send requests, and stop it."""
    argv = [*json.loads(image.last["ENTRYPOINT"]), *json.loads(image.last["CMD"])]
    probe = json.loads(image.last["HEALTHCHECK"].partition("CMD ")[2])
    url = f"http://127.0.0.1:{image.last['EXPOSE']}"
    command = image.command(argv, {"VLLM_API_KEY": _API_KEY}, _RUN_SHM, network=False)
    with subprocess.Popen(command) as outer:
        try:
            started = time.monotonic()
            server = first_child(outer)
            enter = [
                *("nsenter", f"--target={server}", "--mount", "--pid", "--net"),
                *("chroot", str(image.root)),
            ]
            while subprocess.run(
                [*enter, *image.entered(probe, {})], stderr=subprocess.DEVNULL, check=False
            ).returncode:
                if outer.poll() is not None or time.monotonic() - started > _READY_S:
                    raise StepError("the health check did not pass")
                time.sleep(1)
            uid = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{server}/status").read_text(), re.M)
            print(f"== healthy after {time.monotonic() - started:.0f} s, user {uid and uid[1]}")
            if uid is None or uid[1] == "0":
                raise StepError("the server runs as root")
            for program, limit_s in ((_READY, _REPLY_S), (_VIDEO, _VIDEO_S)):
                asked = ["python", "-c", program.format(url=url, key=_API_KEY)]
                subprocess.run([*enter, *image.entered(asked, {})], check=True, timeout=limit_s)
            os.kill(server, getattr(signal, image.last["STOPSIGNAL"]))
            if (code := outer.wait(_STOP_S)) != 0:
                raise StepError(f"status {code} after {image.last['STOPSIGNAL']}")
            print("== stopped with status 0", flush=True)
        finally:
            outer.kill()  # because of --kill-child, this kills all processes in the namespace


def first_child(process: "subprocess.Popen[bytes]") -> int:
    """Return the id of the process that `unshare --fork` starts."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if children := listed.read_text().split():
                return int(children[0])
        time.sleep(0.05)
    raise StepError(f"the entry point ended with status {process.returncode}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("folder", type=Path, help="for the base and the image; 4 GB")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--build-only", action="store_true", help="do not start the entry point")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    build_args = dict(one.split("=", 1) for one in args.build_arg)
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        image = build(args.dockerfile, args.folder.resolve(), args.bind, build_args)
        if not args.build_only:
            serve(image)
    except (StepError, subprocess.SubprocessError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
