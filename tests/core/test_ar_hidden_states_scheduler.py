# SPDX-License-Identifier: Apache-2.0
"""ARHiddenStatesScheduler with a pretended worker: every row leaves once, with its token,
whatever the schedule.
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
    """A scheduler and a pretended worker whose row of position p is filled with p."""

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
        """The worker's output: one token per finished prefill (or `sampled`), and the asked
        rows.
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
            rows = positions[:, None, None].expand(-1, 1, WIDTH).contiguous()
            entries.append(rows if self.modes[name] is not None and len(rows) else None)
            tokens.append(new)
        return ModelRunnerOutput(
            names,
            {n: i for i, n in enumerate(names)},
            sampled_token_ids=tokens,
            pooler_output=entries,
        )

    def receive(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """The front end: text, rows and endings per request."""
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

    def rows(self, name: str) -> list[int]:
        """Positions of all rows that left, checked against their content and their tokens."""
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


def test_rows_leave_with_the_first_token_and_then_one_per_token(harness_for: Any) -> None:
    """A prompt of 10: ten rows with token 1, one with each further token; the last token has
    none.
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


def test_text_of_every_request_is_the_stock_schedulers(harness_for: Any) -> None:
    """Asked or not, in one batch: same tokens, same endings, step by step."""
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
    assert harness.rows("r0") == [] and harness.rows("r4") == []
    assert harness.rows("r1") == list(range(17)) and harness.rows("r2") == list(range(23, 27))


def test_chunks_of_a_prompt_are_held_until_the_first_token(harness_for: Any) -> None:
    """vLLM sends nothing for a partial prefill; the rows wait in the engine."""
    harness = harness_for(max_num_batched_tokens=16)
    harness.add("r", "all", list(range(40)), max_tokens=2)
    harness.run()
    assert [states.num_positions for states in harness.states["r"]] == [40, 1]
    assert harness.rows("r") == list(range(41))


def test_generated_and_last_rows(harness_for: Any) -> None:
    """`generated` begins behind the prompt; `last` leaves once, at the end."""
    harness = harness_for()
    harness.add("g", "generated", list(range(10)), max_tokens=4)
    harness.add("l", "last", list(range(10)), max_tokens=4)
    harness.add("one", "last", list(range(10)), max_tokens=1)
    harness.run()
    assert harness.rows("g") == [10, 11, 12]
    assert harness.rows("l") == [12] and len(harness.states["l"]) == 1
    assert harness.rows("one") == [9]


def test_last_rows_leave_with_every_token_if_the_front_end_may_stop(harness_for: Any) -> None:
    """Stop strings are found outside the engine, which then sends nothing more."""
    harness = harness_for()
    harness.add("l", "last", list(range(10)), max_tokens=3, stop=["x"], detokenize=True)
    harness.run()
    assert harness.rows("l") == [9, 10, 11]
    assert all(states.newest_only for states in harness.states["l"])


def test_cached_tokens_are_computed_again_for_a_request_that_wants_all_rows(
    harness_for: Any,
) -> None:
    """It does not read the prefix cache, but fills it; others read it as ever."""
    harness = harness_for()
    prompt = list(range(48))
    harness.add("first", None, prompt, max_tokens=1)
    harness.run()
    harness.add("all", "all", prompt, max_tokens=2)
    assert harness.step() == {"all": 48}
    harness.run()
    assert harness.rows("all") == list(range(49))
    for name, mode in (("plain", None), ("generated", "generated"), ("last", "last")):
        harness.add(name, mode, prompt, max_tokens=2)
        assert harness.step() == {name: 16}, "two of three blocks come from the cache"
        harness.run()
    assert harness.rows("generated") == [48] and harness.rows("last") == [48]


def test_a_preempted_request_sends_no_row_twice(harness_for: Any) -> None:
    """Its tokens are computed again from the start; rows that have left do not leave again."""
    harness = harness_for(num_blocks=7)
    for name in ("a", "b"):
        harness.add(name, "all", list(range(30)), max_tokens=40)
    harness.run(200)
    assert harness.rows("a") == list(range(69)) and harness.rows("b") == list(range(69))


def test_preemption_happened_there(harness_for: Any) -> None:
    """The test above would prove nothing if six blocks held both requests."""
    harness = harness_for(num_blocks=7)
    for name in ("a", "b"):
        harness.add(name, "all", list(range(30)), max_tokens=40)
    requests = [harness.scheduler.requests[name] for name in ("a", "b")]
    harness.run(200)
    assert sum(request.num_preemptions for request in requests) > 0


def test_rows_behind_a_stop_token_stay_in_the_engine(harness_for: Any) -> None:
    """A step that accepted several drafted tokens, of which a stop cuts some off: their rows go
    with them.
    """
    harness = harness_for()
    harness.add("r", "all", list(range(10)), max_tokens=20, stop_token_ids=[77])
    harness.step()
    scheduled = harness.scheduler.schedule()
    # As if three drafts had been scheduled: four rows, four tokens, the second of which stops.
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
    assert harness.rows("r") == [*range(10), 10, 11]


@pytest.mark.parametrize("sampled", [[5, 9], [5]], ids=["one draft accepted", "none accepted"])
def test_rejected_drafts_have_no_rows(harness_for: Any, sampled: list[int]) -> None:
    """Their positions are computed again, and only then do rows leave for them."""
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
    assert harness.rows("r") == list(range(15))


def test_steps_without_rows_or_tokens_are_counted(harness_for: Any) -> None:
    """A worker that computed nothing but parts of prompts returns neither: the rows behind them
    keep their places.
    """
    harness = harness_for(max_num_batched_tokens=16)
    harness.add("r", "generated", list(range(40)), max_tokens=3)
    for _ in range(2):
        scheduled = harness.scheduler.schedule()
        output = harness.work(scheduled)
        output.pooler_output, output.sampled_token_ids = None, []
        harness.receive(harness.scheduler.update_from_output(scheduled, output))
    harness.run()
    assert harness.rows("r") == [40, 41]


def test_where_no_one_requested_the_step_is_the_stock_schedulers(harness_for: Any) -> None:
    harness = harness_for()
    harness.add("plain", None, list(range(10)), max_tokens=3)
    while harness.scheduler.has_unfinished_requests():
        scheduled = harness.scheduler.schedule()
        output = harness.work(scheduled)
        output.pooler_output = None
        harness.receive(harness.scheduler.update_from_output(scheduled, output))
    assert len(harness.text["plain"]) == 3 and harness.finished["plain"] == (
        FinishReason.LENGTH,
        None,
    )


def test_rows_that_were_replaced_do_not_count(harness_for: Any) -> None:
    """A request for the newest row holds one, however long it gets."""
    harness = harness_for(max_hidden_states_bytes=WIDTH * 4)
    harness.add("last", "last", list(range(10)), max_tokens=5)
    harness.run()
    assert harness.finished["last"] == (FinishReason.LENGTH, None) and harness.rows("last") == [13]


def test_too_many_bytes_end_that_request_only(harness_for: Any) -> None:
    """25 rows of 16 bytes are allowed: the prompt of 20 passes, the sixth generated token does
    not.
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


def test_a_prompt_too_large_in_its_first_chunk_ends_at_once(harness_for: Any) -> None:
    """Before any token: the error is the request's only output, and its memory is free."""
    harness = harness_for(max_hidden_states_bytes=10, max_num_batched_tokens=16)
    harness.add("big", "all", list(range(40)))
    harness.step()
    assert harness.text["big"] == [] and harness.finished["big"][1].code == "too_large"
    harness.step()
    assert harness.scheduler.kv_cache_manager.usage == 0


def test_an_ending_of_ours_is_notified_like_a_stock_one(harness_for: Any) -> None:
    """To the client that asked, with the events and trace headers of the request."""
    harness = harness_for(max_hidden_states_bytes=10, log_stats=True)
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


@pytest.mark.parametrize(
    "entry", [pack_error("unsupported_layer", "layer 9"), pack({})], ids=["an error", "none in it"]
)
def test_an_envelope_for_a_request_without_rows_ends_it(
    harness_for: Any, entry: torch.Tensor
) -> None:
    """One whose words were malformed is none of the scheduler's; what the worker says of it is
    the client's.
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
def test_rows_that_no_client_could_fetch_are_an_error(
    harness_for: Any, plugins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, without the endpoint for rows; not silently the text alone.

    In-process clients get theirs.
    """
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    harness = harness_for()
    harness.add("chatcmpl-1", "all", list(range(5)))
    harness.add("cmpl-text", None, list(range(5)))
    harness.add("mine", "all", list(range(5)))
    harness.run()
    reason, failed = harness.finished["chatcmpl-1"]
    if plugins == "vllm_omni,vllm_omni_ar":
        assert failed is None and harness.rows("chatcmpl-1") == list(range(8))
    else:
        assert reason == FinishReason.ERROR and failed is not None and failed.code == "unsupported"
        assert "VLLM_PLUGINS=vllm_omni_ar" in failed.message
    assert harness.rows("mine") == list(range(8)) and harness.finished["cmpl-text"][1] is None


def test_an_error_of_the_worker_ends_that_request_only(harness_for: Any) -> None:
    """Its entry is an envelope instead of rows."""
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
    assert harness.rows("good") == list(range(8)) and harness.rows("bad") == []


def test_an_aborted_request_leaves_nothing_behind(harness_for: Any) -> None:
    """Its held rows are dropped; an output of a step still in flight does no harm."""
    harness = harness_for(max_num_batched_tokens=16)
    harness.add("r", "all", list(range(40)))
    harness.step()
    scheduled = harness.scheduler.schedule()
    output = harness.work(scheduled)
    harness.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    harness.receive(harness.scheduler.update_from_output(scheduled, output))
    assert harness.scheduler._pending == {} and harness.states["r"] == []


def test_the_list_of_finished_requests_reaches_every_client(harness_for: Any) -> None:
    """Data-parallel front ends count requests by it: an ending of ours must be in it like a
    stock one.
    """
    harness = harness_for(max_hidden_states_bytes=10)
    harness.scheduler.finished_req_ids_dict = defaultdict(set)
    harness.add("big", "all", list(range(8)))
    scheduled = harness.scheduler.schedule()
    outputs = harness.scheduler.update_from_output(scheduled, harness.work(scheduled))
    assert outputs[0].finished_requests == {"big"}


def test_async_scheduling_plans_a_step_ahead(harness_for: Any) -> None:
    """The class takes vLLM's asynchronous base by itself; outputs come a step later, rows stay
    right.
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
    assert harness.rows("r") == list(range(14)) and harness.rows("g") == [6, 7]


def test_it_refuses_to_share_its_field(tiny_language_model: Path) -> None:
    """--return-sampling-mask would mix vLLM's masks with rows: a named error at start."""
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
