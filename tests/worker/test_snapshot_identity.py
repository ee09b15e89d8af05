# SPDX-License-Identifier: Apache-2.0
"""The identity of the model that a snapshot belongs to: digests of the model's configuration and
weights.

If either digest of an unchanged model were computed differently, every existing snapshot would
become invalid.
"""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, text_chunk

from vllm_omni.model_executor.dtypes import KV_CACHE_DTYPES
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import ModelIdentity, ParallelLayout
from vllm_omni.worker.diffusion.sessions.snapshots import model_identity, weights_digest


def vllm_config(omni: dict[str, Any] | None, cache_dtype: str = "auto", **hf: Any) -> Any:
    """Return a mock vLLM config. If `omni` is None, the config's `additional_config` is not a
    mapping.
    """
    fields = {"layers": 4, "torch_dtype": torch.float32, **hf}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(omni_family="a_world", to_dict=lambda: fields),
            dtype=torch.bfloat16,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3),
        additional_config=SimpleNamespace() if omni is None else omni,
    )


def identity(text: str, *, sequence: bool = False, decode: bool = False) -> ModelIdentity:
    """Return the model identity that contains the digest of `text`."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return ModelIdentity(
        family="a_world", config=digest, parallel=ParallelLayout(2, 3, sequence, decode)
    )


PLAIN = (
    '{"config": {"layers": 4, "torch_dtype": "torch.float32"}, "dtype": "torch.bfloat16", '
    '"options": {}'
)


@pytest.mark.parametrize(
    "omni", [None, {}, {"omni": {}}, {"omni": {"model": {}, "vae_stage": False, "height": 64}}]
)
def test_the_digest_covers_configuration_and_dtype(
    omni: dict[str, Any] | None,
) -> None:
    """The digest covers the model configuration and the dtype, but not the transformers version or
    the checkpoint path.
    """
    config = vllm_config(omni, transformers_version="5.0", _name_or_path="/models/a")
    assert model_identity(config, False, ()) == identity(PLAIN + "}")


def test_the_digest_covers_options_caches_and_stages() -> None:
    """The digest covers the options, the K/V cache dtype and the pipeline stages. The keys are
    sorted first, so their order has no effect.
    """
    omni = {
        "model": {"window_frames": 7, "sequence_parallel": True},
        "vae_stage": True,
        "pipeline": "temporal",
    }
    config = vllm_config({"omni": omni}, cache_dtype="fp8")
    text = (
        '{"config": {"layers": 4, "torch_dtype": "torch.float32"}, "dtype": "torch.bfloat16", '
        '"kv_cache_dtype": "fp8", '
        '"options": {"sequence_parallel": true, "window_frames": 7}, '
        '"stages": {"pipeline": "temporal", "pipeline_partition": [3, 1], "vae_stage": true}}'
    )
    assert model_identity(config, True, (3, 1)) == identity(text, sequence=True, decode=True)


def test_both_names_of_e4m3_are_one_storage_format() -> None:
    """`--kv-cache-dtype fp8_e4m3` and `fp8` store the same values, so sessions move between servers
    with either flag.
    """
    identities = {
        name: model_identity(vllm_config(None, cache_dtype=name), False, ())
        for name in KV_CACHE_DTYPES
    }
    assert identities["auto"] != identities["fp8"] == identities["fp8_e4m3"]


def test_a_snapshot_records_the_current_partition(
    make_runner: Any, null_world: Path, tmp_path: Path
) -> None:
    """A snapshot records the current layer partition, not the one before the warm-up."""
    worker = Worker(make_runner(null_world))
    worker.runner.partition = (3, 1)
    text_chunk(worker, "a", 0)
    runner = worker.runner
    expected = model_identity(runner.vllm_config, runner.parts.shares_decode, (3, 1))
    assert expected != model_identity(runner.vllm_config, runner.parts.shares_decode, ())
    assert worker.save("a", tmp_path / "a").model == expected


def test_the_weights_digest_covers_names_dtypes_shapes_and_sixteen_values() -> None:
    """The weights digest covers each tensor's name, dtype and shape, and up to sixteen of its
    values.

    For a transposed matrix, as in quantized layers, the values are taken from the first row,
    because this requires no copy.
    """
    table = torch.arange(160.0).view(4, 40)
    weights = {
        "table": table,
        "nothing": torch.zeros(0),
        "turned": table.t(),
        "bias": torch.arange(3.0),
    }
    text = hashlib.sha256()
    for name, shape, values in (
        ("bias", "[3]", [0.0, 1.0, 2.0]),
        ("nothing", "[0]", []),
        ("table", "[4, 40]", [float(position) for position in range(0, 160, 10)]),
        ("turned", "[40, 4]", [0.0, 40.0, 80.0, 120.0]),
    ):
        text.update(f"{name} torch.float32 {shape}\n".encode())
        text.update(torch.tensor(values).numpy().tobytes())
    assert weights_digest(weights) == text.hexdigest()


def test_a_snapshot_of_other_weights_is_refused(
    make_runner: Any, null_world: Path, tmp_path: Path
) -> None:
    """A process whose weights have changed refuses its own earlier snapshot. It accepts the
    snapshot once the original weights have been restored.
    """
    worker = Worker(make_runner(null_world))
    text_chunk(worker, "a", 0)
    header = worker.save("a", tmp_path / "a")
    parameters = dict(worker.runner.network.named_parameters())
    assert header.ranks[0].weights == weights_digest(parameters)
    first = next(iter(parameters.values()))
    with torch.inference_mode():
        before = first.clone()
        first.add_(1)
        worker.snapshots.invalidate_weights()
        with pytest.raises(RequestFailed, match="the weights differ") as failure:
            worker.restore("b", tmp_path / "a")
        first.copy_(before)
    assert failure.value.code == "foreign_snapshot"
    worker.snapshots.invalidate_weights()
    worker.restore("b", tmp_path / "a")
    assert worker.bits("b") == worker.bits("a")
