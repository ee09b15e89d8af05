# SPDX-License-Identifier: Apache-2.0
"""A program that runs an engine on a Ray cluster and checks or stores the results.

`ray_walk.py diffusion MODEL OUT.safetensors '{"tensor_parallel_size": 2}'` stores the latents of
three sessions. `ray_walk.py ar MODEL - ARGS` compares hidden states with those of a Hugging Face
Transformers forward pass. Both commands print the Ray node of each worker as JSON. The program runs
in a separate process because vLLM selects its platform when it is first imported, and a test
process has already imported vLLM.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

CHUNKS, SESSIONS = 3, 3


def worker_nodes() -> list[str]:
    """Return the node on which Ray has placed each worker."""
    import ray

    ray.init(log_to_driver=False, ignore_reinit_error=True)
    tables = [
        table for table in ray.util.placement_group_table().values() if table["state"] == "CREATED"
    ]
    return [node for table in tables for node in table["bundles_to_node_id"].values()]


async def diffusion(model: Path, out: Path, engine_args: dict[str, Any]) -> list[str]:
    from helpers.engine_client import running_engine
    from safetensors.torch import save_file

    async with running_engine(model, distributed_executor_backend="ray", **engine_args) as client:
        walks = await asyncio.gather(
            *(client.chunks(f"s{seed}", CHUNKS, seed=seed) for seed in range(SESSIONS))
        )
        nodes = worker_nodes()
    save_file(
        {f"{n}.{index}": chunk for n, walk in enumerate(walks) for index, chunk in enumerate(walk)},
        str(out),
    )
    return nodes


def ar(model: Path, engine_args: dict[str, Any]) -> list[str]:
    from ar_engine import Reference, running_llm
    from test_ar_features import check_all_modes

    layers = (0, 2)
    omni = {"hidden_state_layers": list(layers)}
    with running_llm(model, omni, distributed_executor_backend="ray", **engine_args) as llm:
        check_all_modes(llm, Reference(model), (*layers, -1))
        return worker_nodes()


def main(kind: str, model: str, out: str, engine_args: str) -> None:
    if kind == "diffusion":
        nodes = asyncio.run(diffusion(Path(model), Path(out), json.loads(engine_args)))
    else:
        nodes = ar(Path(model), json.loads(engine_args))
    print(json.dumps({"nodes": nodes}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
