# SPDX-License-Identifier: Apache-2.0
"""`ARHiddenStatesScheduler` with a mocked worker.

Every hidden state is sent exactly once, together with its token, however the request is scheduled.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni.core.sched import ARHiddenStatesScheduler
from vllm_omni.hidden_states import (
    EXTRA_ARGS_KEY,
    HiddenStates,
    HiddenStatesRequest,
    error_of,
    hidden_states_of,
)
from vllm_omni.outputs import RequestFailed, pack, pack_error

BLOCK, WIDTH = 16, 4


class Harness:
    """A scheduler and a mocked worker. Every element of the hidden state at position p equals p."""

    def __init__(
        self,
        model: Path,
        *,
        scheduler_cls: type[Scheduler] = ARHiddenStatesScheduler,
        num_blocks: int = 100,
        max_num_batched_tokens: int = 64,
        async_scheduling: bool = False,
        log_stats: bool = False,
        **omni: Any,
    ) -> None:
        args = EngineArgs(
            model=str(model),
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=8,
            additional_config={"omni": omni},
        )
        config = args.create_engine_config()
        config.scheduler_config.async_scheduling = async_scheduling
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.enable_prefix_caching = True
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=log_stats,
        )
        self.modes: dict[str, str | None] = {}
        self.states: dict[str, list[HiddenStates]] = {}
        self.text: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[FinishReason, RequestFailed | None]] = {}
        self.computed: dict[str, int] = {}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(
        self,
        name: str,
        mode: str | None,
        prompt: list[int],
        max_tokens: int = 4,
        client_index: int = 0,
        trace_headers: dict[str, str] | None = None,
        extra_args: dict[str, Any] | None = None,
        **params: Any,
    ) -> None:
        requested = extra_args or (
            HiddenStatesRequest(hidden_states=mode).to_extra_args() if mode else None
        )  # type: ignore[arg-type]
        self.modes[name] = mode
        self.text[name], self.states[name] = [], []
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(
                    max_tokens=max_tokens, ignore_eos=True, extra_args=requested, **params
                ),
                pooling_params=None,
                client_index=client_index,
                trace_headers=trace_headers,
                block_hasher=self._hasher,
            )
        )

    def work(
        self, scheduled: SchedulerOutput, sampled: dict[str, list[int]] | None = None
    ) -> ModelRunnerOutput:
        """Return the worker's output for one step.

        The output contains the requested hidden states and one token per finished prefill, or the
        tokens in `sampled`.
        """
        names = list(scheduled.num_scheduled_tokens)
        for new in scheduled.scheduled_new_reqs:
            self.computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self.computed[name] = computed
        tokens, entries = [], []
        for name in names:
            start, count = self.computed[name], scheduled.num_scheduled_tokens[name]
            request = self.scheduler.requests.get(name)
            length = request.num_tokens if request is not None else 0
            new = (sampled or {}).get(
                name, [100 + start + count] if start + count >= length else []
            )
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            accepted = count - (drafts - (len(new) - 1) if drafts and new else 0)
            self.computed[name] = start + accepted
            positions = torch.arange(start, start + accepted, dtype=torch.float32)
            if self.modes[name] == "generated":
                positions = positions[positions >= (request.num_prompt_tokens if request else 0)]
            elif self.modes[name] == "last":
                positions = positions[-1:] if new else positions[:0]
            values = positions[:, None, None].expand(-1, 1, WIDTH).contiguous()
            entries.append(values if self.modes[name] is not None and len(values) else None)
            tokens.append(new)
        return ModelRunnerOutput(
            names,
            {n: i for i, n in enumerate(names)},
            sampled_token_ids=tokens,
            pooler_output=entries,
        )

    def receive(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Collect text, hidden states and finish reasons per request, as the front end does."""
        received = [out for group in outputs.values() for out in group.outputs]
        assert len({output.request_id for output in received}) == len(received), (
            "one output for each request"
        )
        for output in received:
            assert output.pooling_output is None
            self.text[output.request_id] += output.new_token_ids
            if (states := states_of(output)) is not None:
                self.states[output.request_id].append(states)
            if output.finish_reason is not None:
                self.finished[output.request_id] = (
                    output.finish_reason,
                    error_of(output.stop_reason),
                )

    def step(self, sampled: dict[str, list[int]] | None = None) -> dict[str, int]:
        scheduled = self.scheduler.schedule()
        self.receive(self.scheduler.update_from_output(scheduled, self.work(scheduled, sampled)))
        return dict(scheduled.num_scheduled_tokens)

    def run(self, steps: int = 60) -> None:
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests did not finish")

    def positions_of(self, name: str) -> list[int]:
        """Return the positions of all sent hidden states after checking that their values match the
        positions.
        """
        found: list[int] = []
        for states in self.states[name]:
            assert states[-1][:, 0].tolist() == states.positions.tolist()
            found += states.positions.tolist()
        return found


def states_of(output: EngineCoreOutput) -> HiddenStates | None:
    mask = output.new_sampling_mask
    if mask is None:
        return None
    assert len(mask.to_nested_list()) == len(output.new_token_ids)
    return hidden_states_of(
        CompletionOutput(0, "", [], None, None, sampling_mask=SamplingMask(mask.to_nested_list()))
    )


@pytest.fixture(scope="module")
def harness_for(tiny_language_model: Path) -> Any:
    def make(**options: Any) -> Harness:
        return Harness(tiny_language_model, **options)

    return make


def test_hidden_states_of_the_prompt_come_with_the_first_token(harness_for: Any) -> None:
    """A 10-token prompt yields ten hidden states with the first generated token and one with each
    later token. The last generated token has no hidden state.
    """
    harness = harness_for()
    harness.add("r", "all", list(range(10)), max_tokens=4)
    harness.run()
    assert [states.positions.tolist() for states in harness.states["r"]] == [
        list(range(10)),
        [10],
        [11],
        [12],
    ]
    assert [states.token_ids.tolist() for states in harness.states["r"]][1:] == [
        [t] for t in harness.text["r"][:3]
    ]
    assert harness.states["r"][0].token_ids.tolist() == list(range(10))


def test_text_equals_that_of_the_stock_scheduler(harness_for: Any) -> None:
    """When requests with and without hidden states share a batch, tokens and finish reasons match
    those of the stock scheduler in every step.
    """
    harness, stock = harness_for(), harness_for(scheduler_cls=Scheduler)
    for i, mode in enumerate((None, "all", "generated", "last", None)):
        harness.add(f"r{i}", mode, list(range(5 + 9 * i)), max_tokens=3 + i)
        stock.add(f"r{i}", None, list(range(5 + 9 * i)), max_tokens=3 + i)
    while harness.scheduler.has_unfinished_requests():
        assert harness.step() == stock.step()
    assert harness.text == stock.text
    assert {n: end[0] for n, end in harness.finished.items()} == {
        n: end[0] for n, end in stock.finished.items()
    }
    assert harness.positions_of("r0") == [] and harness.positions_of("r4") == []
    assert harness.positions_of("r1") == list(range(17)) and harness.positions_of("r2") == list(
        range(23, 27)
    )


def test_hidden_states_of_a_chunked_prefill_wait_for_the_first_token(harness_for: Any) -> None:
    """Hidden states of a partial prefill wait in the engine, because vLLM sends no output for a
    partial prefill.
    """
    harness = harness_for(max_num_batched_tokens=16)
    harness.add("r", "all", list(range(40)), max_tokens=2)
    harness.run()
    assert [states.num_positions for states in harness.states["r"]] == [40, 1]
    assert harness.positions_of("r") == list(range(41))


def test_modes_generated_and_last(harness_for: Any) -> None:
    """The `generated` mode sends only the hidden states of positions after the prompt. The `last`
    mode sends one hidden state, at the end of the request.
    """
    harness = harness_for()
    harness.add("g", "generated", list(range(10)), max_tokens=4)
    harness.add("l", "last", list(range(10)), max_tokens=4)
    harness.add("one", "last", list(range(10)), max_tokens=1)
    harness.run()
    assert harness.positions_of("g") == [10, 11, 12]
    assert harness.positions_of("l") == [12] and len(harness.states["l"]) == 1
    assert harness.positions_of("one") == [9]


def test_mode_last_sends_every_token_with_stop_strings(harness_for: Any) -> None:
    """With stop strings, the `last` mode sends a hidden state with every token.

    The front end, not the engine, detects a stop string. The engine sends nothing afterwards, so
    the last hidden state must already have arrived.
    """
    harness = harness_for()
    harness.add("l", "last", list(range(10)), max_tokens=3, stop=["x"], detokenize=True)
    harness.run()
    assert harness.positions_of("l") == [9, 10, 11]
    assert all(states.newest_only for states in harness.states["l"])


def test_mode_all_skips_the_prefix_cache(
    harness_for: Any,
) -> None:
    """A request in `all` mode fills the prefix cache but does not read it. Requests in the other
    modes read it.
    """
    harness = harness_for()
    prompt = list(range(48))
    harness.add("first", None, prompt, max_tokens=1)
    harness.run()
    harness.add("all", "all", prompt, max_tokens=2)
    assert harness.step() == {"all": 48}
    harness.run()
    assert harness.positions_of("all") == list(range(49))
    for name, mode in (("plain", None), ("generated", "generated"), ("last", "last")):
        harness.add(name, mode, prompt, max_tokens=2)
        assert harness.step() == {name: 16}, "two of three blocks come from the cache"
        harness.run()
    assert harness.positions_of("generated") == [48] and harness.positions_of("last") == [48]


def test_a_preempted_request_sends_no_hidden_state_twice(harness_for: Any) -> None:
    """A preempted request computes all of its tokens again, but hidden states that were already
    sent are not sent again.
    """
    harness = harness_for(num_blocks=7)
    for name in ("a", "b"):
        harness.add(name, "all", list(range(30)), max_tokens=40)
    requests = [harness.scheduler.requests[name] for name in ("a", "b")]
    harness.run(200)
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(harness.positions_of(name) == list(range(69)) for name in ("a", "b"))


def test_hidden_states_after_a_stop_token_are_dropped(harness_for: Any) -> None:
    """Drafts that were accepted after a stop token are discarded together with their hidden
    states.
    """
    harness = harness_for()
    harness.add("r", "all", list(range(10)), max_tokens=20, stop_token_ids=[77])
    harness.step()
    scheduled = harness.scheduler.schedule()
    # Three drafts are scheduled, so the step yields four tokens. The second of them is the stop
    # token.
    scheduled.num_scheduled_tokens["r"] = 4
    scheduled.scheduled_spec_decode_tokens["r"] = [5, 77, 6]
    harness.scheduler.requests["r"].num_computed_tokens += 3
    harness.scheduler.requests["r"].num_in_flight_tokens += 3
    harness.receive(
        harness.scheduler.update_from_output(
            scheduled, harness.work(scheduled, {"r": [5, 77, 6, 8]})
        )
    )
    assert harness.text["r"][1:] == [5, 77] and harness.finished["r"][0] == FinishReason.STOP
    assert harness.positions_of("r") == [*range(10), 10, 11]


@pytest.mark.parametrize("sampled", [[5, 9], [5]], ids=["one draft accepted", "none accepted"])
def test_rejected_drafts_have_no_hidden_states(harness_for: Any, sampled: list[int]) -> None:
    """The position of a rejected draft is computed again, and its hidden state is sent only
    then.
    """
    harness = harness_for()
    harness.add("r", "all", list(range(10)), max_tokens=6)
    harness.step()
    scheduled = harness.scheduler.schedule()
    scheduled.num_scheduled_tokens["r"] = 4
    scheduled.scheduled_spec_decode_tokens["r"] = [5, 6, 7]
    harness.scheduler.requests["r"].num_computed_tokens += 3
    harness.scheduler.requests["r"].num_in_flight_tokens += 3
    harness.receive(
        harness.scheduler.update_from_output(scheduled, harness.work(scheduled, {"r": sampled}))
    )
    harness.run()
    assert harness.positions_of("r") == list(range(15))


def test_steps_without_hidden_states_or_tokens_are_counted(harness_for: Any) -> None:
    """Positions stay correct after a step that contains only partial prefills and thus returns
    neither hidden states nor tokens.
    """
    harness = harness_for(max_num_batched_tokens=16)
    harness.add("r", "generated", list(range(40)), max_tokens=3)
    for _ in range(2):
        scheduled = harness.scheduler.schedule()
        output = harness.work(scheduled)
        output.pooler_output, output.sampled_token_ids = None, []
        harness.receive(harness.scheduler.update_from_output(scheduled, output))
    harness.run()
    assert harness.positions_of("r") == [40, 41]


def test_the_byte_limit_ends_only_the_request(harness_for: Any) -> None:
    """A request ends with the `too_large` code when its hidden states exceed the byte limit.

    25 hidden states of 16 bytes each are allowed, and the prompt has 20 tokens, so the hidden state
    of the sixth generated token exceeds the limit. The `last` mode counts only the newest hidden
    state.
    """
    harness = harness_for(max_hidden_states_bytes=25 * WIDTH * 4)
    harness.add("big", "all", list(range(20)), max_tokens=20)
    harness.add("last", "last", list(range(20)), max_tokens=20)
    harness.add("plain", None, list(range(20)), max_tokens=20)
    harness.run()
    reason, failed = harness.finished["big"]
    assert reason == FinishReason.ERROR and failed is not None and failed.code == "too_large"
    assert failed.message == (
        "416 bytes of hidden states at token 26 exceed the limit of 400 bytes per request "
        "(omni.max_hidden_states_bytes): request fewer layers, `generated` or `last` hidden "
        "states, or fewer tokens"
    )
    assert harness.finished["last"] == harness.finished["plain"] == (FinishReason.LENGTH, None)
    assert len(harness.text["plain"]) == 20 and len(harness.text["big"]) == 7
    assert harness.scheduler.get_num_unfinished_requests() == 0 and harness.scheduler._pending == {}


def test_a_prompt_above_the_byte_limit_ends_in_its_first_chunk(harness_for: Any) -> None:
    """If the first chunk of a prompt exceeds the byte limit, the error is the request's only
    output, and the request's K/V blocks are freed.
    """
    harness = harness_for(max_hidden_states_bytes=10, max_num_batched_tokens=16)
    harness.add("big", "all", list(range(40)))
    harness.step()
    assert harness.text["big"] == [] and harness.finished["big"][1].code == "too_large"
    harness.step()
    assert harness.scheduler.kv_cache_manager.usage == 0


def test_an_error_is_reported_like_a_stock_finish(harness_for: Any) -> None:
    """The client of a failed request receives the request's events and trace headers, as after a
    stock finish.

    The failed request also appears in the list of finished requests, which data-parallel front ends
    count.
    """
    harness = harness_for(max_hidden_states_bytes=10, log_stats=True)
    harness.scheduler.finished_req_ids_dict = defaultdict(set)
    harness.add(
        "big", "all", list(range(8)), client_index=2, trace_headers={"traceparent": "00-1-2-01"}
    )
    scheduled = harness.scheduler.schedule()
    output = harness.work(scheduled)
    output.sampled_token_ids = [[]]
    outputs = harness.scheduler.update_from_output(scheduled, output)
    (reported,) = outputs[2].outputs
    assert reported.finish_reason == FinishReason.ERROR and reported.events
    assert reported.trace_headers == {"traceparent": "00-1-2-01"}
    assert outputs[2].finished_requests == {"big"}


@pytest.mark.parametrize(
    "entry", [pack_error("unsupported_layer", "layer 9"), pack({})], ids=["an error", "none in it"]
)
def test_an_error_envelope_ends_a_request_without_hidden_states(
    harness_for: Any, entry: torch.Tensor
) -> None:
    """The worker validates hidden-state parameters. If they are malformed, the client receives the
    worker's error.
    """
    harness = harness_for()
    harness.add("bad", None, list(range(5)), extra_args={EXTRA_ARGS_KEY: "nonsense"})
    scheduled = harness.scheduler.schedule()
    output = harness.work(scheduled)
    output.pooler_output = [entry]
    harness.receive(harness.scheduler.update_from_output(scheduled, output))
    reason, failed = harness.finished["bad"]
    assert reason == FinishReason.ERROR and failed is not None
    assert (failed.code, failed.message) in (
        ("unsupported_layer", "layer 9"),
        ("internal", "the worker returned an envelope without an error"),
    )


@pytest.mark.parametrize("plugins", [None, "vllm_omni", "vllm_omni,vllm_omni_ar"])
@pytest.mark.parametrize("prefix", ["chatcmpl-", "resp_", "generate-tokens-", "transcribe-"])
def test_hidden_states_without_an_endpoint_are_an_error(
    harness_for: Any, prefix: str, plugins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, a request for hidden states fails unless the hidden-states endpoint is loaded.

    Without this check, the request would return only text. In-process clients receive their hidden
    states with or without the endpoint.
    """
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    harness = harness_for()
    harness.add(f"{prefix}1", "all", list(range(5)))
    harness.add("cmpl-text", None, list(range(5)))
    harness.add("mine", "all", list(range(5)))
    harness.run()
    reason, failed = harness.finished[f"{prefix}1"]
    if plugins == "vllm_omni,vllm_omni_ar":
        assert failed is None and harness.positions_of(f"{prefix}1") == list(range(8))
    else:
        assert reason == FinishReason.ERROR and failed is not None and failed.code == "unsupported"
        assert "VLLM_PLUGINS=vllm_omni_ar" in failed.message
    assert (
        harness.positions_of("mine") == list(range(8)) and harness.finished["cmpl-text"][1] is None
    )


def test_an_error_of_the_worker_ends_only_its_request(harness_for: Any) -> None:
    """A request fails if the worker returns an error envelope in place of its hidden states. Other
    requests continue.
    """
    harness = harness_for()
    harness.add("bad", "all", list(range(5)))
    harness.add("good", "all", list(range(5)))
    scheduled = harness.scheduler.schedule()
    output = harness.work(scheduled)
    assert output.pooler_output is not None
    output.pooler_output[output.req_id_to_index["bad"]] = pack_error("unsupported_layer", "layer 9")
    harness.receive(harness.scheduler.update_from_output(scheduled, output))
    reason, failed = harness.finished["bad"]
    assert (
        reason == FinishReason.ERROR and failed is not None and failed.code == "unsupported_layer"
    )
    harness.run()
    assert harness.positions_of("good") == list(range(8)) and harness.positions_of("bad") == []


def test_an_aborted_request_drops_its_hidden_states(harness_for: Any) -> None:
    """Aborting a request drops its pending hidden states, and the output of a step that is in
    flight is ignored.
    """
    harness = harness_for(max_num_batched_tokens=16)
    harness.add("r", "all", list(range(40)))
    harness.step()
    scheduled = harness.scheduler.schedule()
    output = harness.work(scheduled)
    harness.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    harness.receive(harness.scheduler.update_from_output(scheduled, output))
    assert harness.scheduler._pending == {} and harness.states["r"] == []


def test_async_scheduling_returns_the_same_positions(harness_for: Any) -> None:
    """With asynchronous scheduling, outputs arrive one step later, with the same positions as in
    synchronous scheduling.

    `ARHiddenStatesScheduler` then derives from vLLM's asynchronous scheduler.
    """
    harness = harness_for(async_scheduling=True)
    assert isinstance(harness.scheduler, AsyncScheduler) and isinstance(
        harness.scheduler, ARHiddenStatesScheduler
    )
    assert not isinstance(harness_for().scheduler, AsyncScheduler)
    harness.add("r", "all", list(range(10)), max_tokens=5)
    harness.add("g", "generated", list(range(6)), max_tokens=3)
    in_flight: list[SchedulerOutput] = []
    for _ in range(12):
        scheduled = harness.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            in_flight.append(scheduled)
        if len(in_flight) == 2 or (in_flight and not scheduled.total_num_scheduled_tokens):
            done = in_flight.pop(0)
            sampled = {name: [9] for name in done.num_scheduled_tokens}
            harness.receive(harness.scheduler.update_from_output(done, harness.work(done, sampled)))
    assert not harness.scheduler.has_unfinished_requests()
    assert harness.positions_of("r") == list(range(14)) and harness.positions_of("g") == [6, 7]


def test_return_sampling_mask_is_refused(tiny_language_model: Path) -> None:
    """`--return-sampling-mask` is rejected at startup, because hidden states use the same output
    field.
    """
    with pytest.raises(
        ValueError,
        match=r"^ARHiddenStatesScheduler sends .* --return-sampling-mask: use one of them$",
    ):
        _with_sampling_masks(tiny_language_model)


def _with_sampling_masks(model: Path) -> None:
    class Masks(ARHiddenStatesScheduler):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config.model_config.return_sampling_mask = True
            super().__init__(vllm_config, *args, **kwargs)

    Harness(model, scheduler_cls=Masks)
