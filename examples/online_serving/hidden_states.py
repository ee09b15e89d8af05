# SPDX-License-Identifier: Apache-2.0
"""Stream a chat completion from a server, then fetch its hidden states.

docs/how_to/hidden_states.md explains this script.

    python examples/online_serving/hidden_states.py --url http://127.0.0.1:8000 "What is a tree?"

A client needs only httpx, safetensors and torch; `from_safetensors` is optional.
"""

import argparse
import json
from pathlib import Path

import httpx

from vllm_omni.entrypoints.loopback import is_loopback
from vllm_omni.hidden_states import from_safetensors


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="What is a tree?")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", choices=("all", "generated", "last"), default="all", help="default: all"
    )
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[-1],
        help="layers, numbered as in transformers (default: -1)",
    )
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--api-key", help="if the server requires one")
    parser.add_argument("--out", type=Path, help="safetensors file for the hidden states")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with httpx.Client(
        base_url=args.url, headers=headers, timeout=120, trust_env=not is_loopback(args.url)
    ) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": args.prompt}],
            "max_tokens": args.max_tokens,
            "stream": True,
            # The options are JSON text, because vLLM's `vllm_xargs` does not allow nested maps.
            "vllm_xargs": {"omni": json.dumps({"hidden_states": args.rows, "layers": args.layers})},
        }
        response_id = stream_text(client, body)
        response = client.get(f"/v1/hidden_states/{response_id}")
        if response.status_code != 200:
            raise SystemExit(response.json()["error"]["message"])
    states = from_safetensors(response.content)
    for layer, rows in states.items():
        print(f"layer {layer}: {tuple(rows.shape)} {rows.dtype}")
    if args.out:
        args.out.write_bytes(response.content)
        print(f"wrote {args.out}")


def stream_text(client: httpx.Client, body: dict[str, object]) -> str:
    """Print the text while it is streamed, and return the id of the response."""
    response_id = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        if stream.status_code != 200:
            raise SystemExit(stream.read().decode())
        for line in stream.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            response_id = event["id"]
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    return response_id


if __name__ == "__main__":
    main()
