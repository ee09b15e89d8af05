# SPDX-License-Identifier: Apache-2.0
"""Tests of LoRA adapters in the runner.

The tests include batches, forks, snapshots, chunks in flight, vLLM's own `lora_request` argument,
and FP8 weights.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lora_files as files
from helpers.scheduling import new_request, run_to_end
from helpers.snapshot_steps import Worker
from vllm.lora.request import LoRARequest

from vllm_omni.inputs import Lora
from vllm_omni.outputs import RequestFailed

pytestmark = pytest.mark.usefixtures("uncompiled")

SMALL = {"window_frames": 7, "sink_frames": 2}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
INK, WOOL = [Lora(name="ink", scale=0.8)], [Lora(name="wool")]
MakeRunner = Callable[..., Any]


@pytest.fixture(scope="module")
def requests(causal_wan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {
        name: files.write_causal_wan(causal_wan, folder / f"{name}.safetensors", seed)
        for seed, name in enumerate(("ink", "wool"), start=1)
    }
    return {
        name: LoRARequest(name, number, str(path))
        for number, (name, path) in enumerate(paths.items(), start=1)
    }


def make(
    make_runner: MakeRunner, model: Path, requests: dict[str, LoRARequest], **more: Any
) -> Worker:
    omni = {
        "model": {**SMALL, **more.pop("options", {})},
        "max_sessions": 16,
        **more.pop("omni", {}),
    }
    runner = make_runner(model, omni, **LORA, **{"dtype": "float32", **more})
    assert all(runner.add_lora(request) for request in requests.values())
    assert runner.list_loras() == {1, 2}
    return Worker(runner)


def chunk(worker: Worker, session: str, **fields: Any) -> torch.Tensor:
    return worker.chunk(session, output="latents", **fields)["latents"]


def stream(worker: Worker, session: str, choices: list[list[Lora] | None]) -> list[torch.Tensor]:
    """Return the latents of a session's next chunks, one chunk for each entry of `choices`. If the
    session does not exist, it is opened.
    """
    first: list[dict[str, Any]] = [
        {} if session in worker.runner.sessions else {"prompt": "a field"}
    ]
    first += [{}] * len(choices)
    return [chunk(worker, session, lora=lora, **first[index]) for index, lora in enumerate(choices)]


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_adapters_apply_in_batches_forks_and_restored_sessions(
    make_runner: MakeRunner, causal_wan: Path, requests: dict[str, LoRARequest], tmp_path: Path
) -> None:
    """Requests with different adapters never share a forward pass, so each request produces the
    same result as when it runs by itself.

    Forks and restored sessions keep the adapters.
    """
    worker = make(make_runner, causal_wan, requests, omni={"batch_invariant": False})
    plain = make_runner(causal_wan, {"model": SMALL, "batch_invariant": False}, dtype="float32")
    base = stream(worker, "base", [None] * 3)
    assert equal(stream(Worker(plain), "base", [None] * 3), base), "slots change nothing"
    alone = {
        "base": base[0],
        "ink": stream(worker, "ink", [INK])[0],
        "both": stream(worker, "both", [INK + WOOL])[0],
    }
    choices = {"base": None, "ink": INK, "both": INK + WOOL}
    new = [
        new_request(name, session_id=f"{name}-2", prompt="a field", output="latents", lora=lora)
        for name, lora in choices.items()
    ]
    together = run_to_end(worker.runner, *new)
    for name, latents in alone.items():
        assert torch.equal(together[name][1]["latents"], latents), name
    assert not torch.equal(alone["ink"], alone["base"]) and not torch.equal(
        alone["both"], alone["ink"]
    )

    run_to_end(worker.runner, new_request("f", session_id="ink", op="fork", fork_to="branch"))
    worker.save("ink", tmp_path / "ink")
    worker.restore("restored", tmp_path / "ink")
    with_prompt = [chunk(worker, name, prompt="at night") for name in ("ink", "branch", "restored")]
    assert equal(with_prompt[1:], [with_prompt[0]] * 2)
    ended = chunk(worker, "branch", lora=[])
    assert not torch.equal(ended, chunk(worker, "restored"))


def test_a_snapshot_names_its_adapters_and_requires_them(
    make_runner: MakeRunner, causal_wan: Path, requests: dict[str, LoRARequest], tmp_path: Path
) -> None:
    """A snapshot records its session's adapters. If the same adapters are loaded, the session
    continues bit for bit. Otherwise, the snapshot is refused.
    """
    worker = make(make_runner, causal_wan, requests)
    stream(worker, "walk", [INK + WOOL, None])
    header = worker.save("walk", tmp_path / "walk")
    assert [(used.name, used.scale) for used in header.lora] == [("ink", 0.8), ("wool", 1.0)]
    assert worker.save_live("walk", tmp_path / "checkpoint")[0].lora == header.lora
    expected = stream(worker, "walk", [None, WOOL])
    elsewhere = make(make_runner, causal_wan, requests)
    for name in ("walk", "checkpoint"):
        elsewhere.restore(name, tmp_path / name)
        assert equal(stream(elsewhere, name, [None, WOOL]), expected)

    ink, wool = (
        f"adapter '{used.name}' (scale {used.scale:g}, weights {used.digest})"
        for used in header.lora
    )
    here = header.lora[1].digest
    other = LoRARequest("ink", 1, requests["wool"].lora_path, load_inplace=True)
    assert elsewhere.runner.add_lora(other)
    refused(
        elsewhere,
        tmp_path,
        f"the session uses {ink}, and the weights of that name here are {here}: load those",
    )
    assert elsewhere.runner.remove_lora(1)
    refused(elsewhere, tmp_path, f"the session uses {ink}, not loaded here: load it")
    assert elsewhere.runner.remove_lora(2)
    refused(elsewhere, tmp_path, f"the session uses {ink}, {wool}, not loaded here: load it")
    plain = Worker(make_runner(causal_wan, {"model": SMALL}, dtype="float32"))
    refused(
        plain,
        tmp_path,
        f"the session uses {ink}, {wool}, and this server runs without --enable-lora",
    )
    for number in (1, 2):
        assert elsewhere.runner.add_lora(list(requests.values())[number - 1])
    elsewhere.restore("again", tmp_path / "walk")
    assert equal(stream(elsewhere, "again", [None, WOOL]), expected)


def test_removed_adapters_are_not_required_by_a_snapshot(
    make_runner: MakeRunner, causal_wan: Path, requests: dict[str, LoRARequest], tmp_path: Path
) -> None:
    """After an adapter is removed from a session, a server without adapters can restore the
    session's snapshot.

    The session then continues bit for bit, and requests that use adapters are refused.
    """
    worker = make(make_runner, causal_wan, requests)
    stream(worker, "walk", [INK, []])
    assert worker.save("walk", tmp_path / "walk").lora == []
    plain = Worker(make_runner(causal_wan, {"model": SMALL}, dtype="float32"))
    plain.restore("walk", tmp_path / "walk")
    assert equal(stream(plain, "walk", [None]), stream(worker, "walk", [None]))
    with pytest.raises(RequestFailed, match="runs without --enable-lora"):
        chunk(plain, "refused", prompt="a field", lora=INK)


def refused(worker: Worker, folder: Path, words: str) -> None:
    """Assert that restoring the `walk` file fails with a one-line error that contains `words`, and
    that no session is opened.
    """
    with pytest.raises(RequestFailed, match=re.escape(words)) as refusal:
        worker.restore("late", folder / "walk")
    assert refusal.value.code == "foreign_snapshot" and "\n" not in refusal.value.message
    assert "late" not in worker.runner.sessions


def test_a_switch_of_adapters_recomputes_the_prompt_keys(
    make_runner: MakeRunner, causal_wan: Path, tmp_path: Path
) -> None:
    """An adapter that changes the prompt's cross-attention keys and values takes effect even if the
    prompt stays the same.

    Removing the adapter restores the base model's output.
    """
    target = files.causal_wan_target(causal_wan)
    made = files.factors(
        target, [f"blocks.{n}.cross_attn.{kv}" for n in range(4) for kv in "kv"], seed=4, size=1.0
    )
    path = files.write_community_ab(made, tmp_path / "text.safetensors")
    worker = Worker(make_runner(causal_wan, {"model": SMALL}, dtype="float32", **LORA))
    assert worker.runner.add_lora(LoRARequest("text", 1, str(path)))
    text = [Lora(name="text")]
    base = stream(worker, "base", [None, None])
    switched = stream(worker, "switched", [None, text])
    assert torch.equal(switched[0], base[0]) and not torch.equal(switched[1], base[1])
    assert equal(stream(worker, "back", [text, text, []])[:1], stream(worker, "again", [text]))
    assert equal(stream(worker, "after", [None, None]), base)


@pytest.mark.parametrize(
    "two", [(None, WOOL), (WOOL, None)], ids=["switched by the second", "by the first"]
)
def test_chunks_in_flight_keep_the_adapters_they_started_with(
    make_runner: MakeRunner,
    causal_wan: Path,
    requests: dict[str, LoRARequest],
    two: tuple[Any, Any],
) -> None:
    """When two chunks of a session are in flight with different adapters, they produce the same
    results as when they run one at a time.
    """
    model = {
        "cache": "noise_matched",
        "denoising_steps": [1000, 500],
        "video_denoising_steps": [700, 500],
    }
    in_turn = make(make_runner, causal_wan, requests, options=model)
    expected = stream(in_turn, "a", [INK, *two])
    at_once = make(make_runner, causal_wan, requests, options=model, omni={"chunks_in_flight": 2})
    got = stream(at_once, "a", [INK])
    fields: dict[str, Any] = {"session_id": "a", "output": "latents"}
    pair = run_to_end(
        at_once.runner,
        *(
            new_request(str(index), chunk_index=index, lora=lora, **fields)
            for index, lora in enumerate(two, 1)
        ),
    )
    got += [pair[number][1]["latents"] for number in "12"]
    assert equal(got, expected)


def test_lora_request_of_vllm_names_an_adapter(
    make_runner: MakeRunner, causal_wan: Path, requests: dict[str, LoRARequest]
) -> None:
    """If the adapter that vLLM's `lora_request` names is not loaded yet, the request loads it. If
    loading fails, only that request fails.
    """
    worker = Worker(make_runner(causal_wan, {"model": SMALL}, dtype="float32", **LORA))

    def once(session: str, request: LoRARequest | None) -> Any:
        data = new_request("r", session_id=session, prompt="a field", output="latents")
        result = run_to_end(worker.runner, dataclasses.replace(data, lora_request=request))["r"]
        return result if isinstance(result, RequestFailed) else result[1]["latents"].clone()

    assert torch.equal(once("a", requests["wool"]), stream(worker, "b", [WOOL])[0])
    failure = once("c", LoRARequest("lost", 5, "/nowhere.safetensors"))
    assert (
        isinstance(failure, RequestFailed) and "adapter 'lost' cannot be loaded" in failure.message
    )
    assert not torch.equal(once("d", None), once("e", requests["wool"]))


def test_an_adapter_for_another_model_is_refused(
    make_runner: MakeRunner, causal_wan: Path, requests: dict[str, LoRARequest], tmp_path: Path
) -> None:
    """An adapter for another model is rejected with a one-line error, and adapters already loaded
    stay usable.
    """
    worker = make(make_runner, causal_wan, requests)
    before = stream(worker, "a", [INK])
    made = {"double_blocks.0.proj": (torch.zeros(2, 4), torch.zeros(4, 2))}
    path = files.write_community(made, tmp_path / "flux.safetensors")
    with pytest.raises(
        ValueError,
        match=r"adapter 'flux': .*modules that this model lacks or keeps as they are: 3 \(",
    ):
        worker.runner.add_lora(LoRARequest("flux", 9, str(path)))
    assert worker.runner.list_loras() == {1, 2}
    assert [worker.runner.pin_lora(number) for number in (1, 2, 9)] == [True, True, False]
    assert equal(stream(worker, "b", [INK]), before)


def test_adapters_on_fp8_weights_have_the_effect_of_bf16_weights(
    make_runner: MakeRunner, causal_wan: Path, requests: dict[str, LoRARequest]
) -> None:
    """An adapter has nearly the same effect on FP8 weights as on bf16 weights.

    The adapter product is computed in bf16 and added to the quantized product, so the effect has
    almost the same direction and size (relative difference below 0.2). The adapters still apply
    after a reload, which quantizes the weights again.
    """
    effects, bases = [], []
    for more in ({}, {"quantization": "fp8_per_channel"}):
        worker = make(make_runner, causal_wan, requests, dtype="bfloat16", **more)
        base, ink = stream(worker, "base", [None]), stream(worker, "ink", [INK])
        with torch.inference_mode():  # `make_runner` creates the weights in this mode
            worker.runner.reload_weights()
        assert equal(stream(worker, "base-2", [None]), base) and equal(
            stream(worker, "ink-2", [INK]), ink
        )
        bases.append(base[0].float())
        effects.append((ink[0] - base[0]).float())
    assert not torch.equal(*bases)
    assert (effects[1] - effects[0]).norm() / effects[0].norm() < 0.2
