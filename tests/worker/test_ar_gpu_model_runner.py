# SPDX-License-Identifier: Apache-2.0
"""Tests of the mixins for vLLM's two model runners (V1 and V2), with mocked runners, and checks of
the vLLM source that the mixins rely on.

A mocked base class replaces vLLM's runner and records the state that the hooks pass on to it. The
tests at the end of the file compare the mocks with vLLM's own classes. There is a test for each of
the five faults found in the review of the first version (vLLM-Omni PR 3).
"""

import ast
import dataclasses
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ar_steps import new_request, scheduler_output
from helpers.ar_compatibility import feature
from helpers.cpu_build import on_cpu
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_input_batch, gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu import input_batch as v2_input_batch
from vllm.v1.worker.gpu import model_runner as v2_model_runner

import vllm_omni
import vllm_omni.hidden_states
from vllm_omni.hidden_states import HiddenStatesRequest
from vllm_omni.worker.ar import gpu_worker as ar_gpu_worker
from vllm_omni.worker.ar import hidden_states as hidden_state_collection
from vllm_omni.worker.ar import layers as hidden_state_layers
from vllm_omni.worker.ar import runner as ar_gpu_model_runner
from vllm_omni.worker.ar import worker as ar_worker
from vllm_omni.worker.ar.hidden_states import HiddenStateCollector
from vllm_omni.worker.ar.layers import LayerTaps
from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin, ARModelRunnerV2Mixin

LAYERS, WIDTH = 4, 8
OUR_MODULES = (
    ar_gpu_model_runner,
    ar_gpu_worker,
    ar_worker,
    hidden_state_layers,
    hidden_state_collection,
)
REPO = Path(vllm_omni.__file__).parents[1]


class StateV1(NamedTuple):
    scheduler_output: Any
    hidden_states: Any
    aux_hidden_states: Any


class StateV2(NamedTuple):
    input_batch: Any
    hidden_states: Any
    aux_hidden_states: Any


class AsyncOutput(AsyncModelRunnerOutput):
    """A mock of vLLM's asynchronous output. Its sampled tokens exist only after `get_output`."""

    def __init__(self, output: ModelRunnerOutput, sampled: list[list[int]]) -> None:
        self.output, self.sampled = output, sampled

    def get_output(self) -> ModelRunnerOutput:
        self.output.sampled_token_ids = self.sampled
        return self.output

    def get_kv_connector_output(self) -> Any:  # exists in vLLM 0.33
        return self.output.kv_connector_output


class MockRunner:
    """A mock of the interface that vLLM's V1 and V2 model runners share.

    `execute_model` stores a state, which `sample_tokens` consumes.
    """

    def __init__(
        self, collector: HiddenStateCollector, taps: LayerTaps, asynchronous: bool = False
    ) -> None:
        self.hidden_state_collector, self.layer_taps = collector, taps
        self.asynchronous = asynchronous
        self.execute_model_state: Any = None
        self.seen: list[Any] = []
        self.sampled: dict[str, list[int]] = {}
        self.stage_output: ModelRunnerOutput | None = None

    def finish(self, names: list[str]) -> Any:
        self.seen.append(self.execute_model_state)
        self.execute_model_state = None
        sampled = [self.sampled.get(name, [1]) for name in names]
        output = ModelRunnerOutput(
            names,
            {name: i for i, name in enumerate(names)},
            sampled_token_ids=[] if self.asynchronous else sampled,
            prompt_logprobs_dict=dict.fromkeys(names),
            num_nans_in_logits=dict.fromkeys(names, 3),
            kv_connector_output=SimpleNamespace(),  # type: ignore[arg-type]
            cudagraph_stats=SimpleNamespace(),  # type: ignore[arg-type]
        )
        return AsyncOutput(output, sampled) if self.asynchronous else output


class MockV1(MockRunner):
    broadcast_pp_output = False

    def execute_model(self, scheduled: SchedulerOutput, intermediate_tensors: Any = None) -> None:
        self.received = intermediate_tensors
        names = list(scheduled.num_scheduled_tokens)
        total = scheduled.total_num_scheduled_tokens
        computed = np.array(
            [0 if n in {d.req_id for d in scheduled.scheduled_new_reqs} else 3 for n in names]
        )
        self.input_batch = SimpleNamespace(
            req_ids=names, num_computed_tokens_cpu=np.append(computed, [9, 9])
        )
        self.execute_model_state = StateV1(scheduled, hidden(total + 3), aux(total + 3))

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.grammar_output = grammar_output
        if self.stage_output is not None:  # as on every stage except the last
            return self.stage_output
        return self.finish(list(self.input_batch.req_ids))


class MockV2(MockRunner):
    def execute_model(self, scheduled: SchedulerOutput, **kwargs: Any) -> None:
        self.received = kwargs.get("intermediate_tensors")
        # V2 sorts its batch so that decodes come first, and its buffers are longer than the batch.
        names = sorted(
            scheduled.num_scheduled_tokens, key=scheduled.num_scheduled_tokens.__getitem__
        )
        counts = [scheduled.num_scheduled_tokens[name] for name in names]
        total = sum(counts)
        new = {data.req_id for data in scheduled.scheduled_new_reqs}
        drafts = [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        batch = SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            query_start_loc_np=np.array([0, *np.cumsum(counts), total, total], dtype=np.int32),
            num_computed_tokens_np=np.array(
                [0 if name in new else 3 for name in names], dtype=np.int32
            ),
            num_draft_tokens_per_req=np.array(drafts, dtype=np.int32) if any(drafts) else None,
        )
        self.execute_model_state = StateV2(batch, hidden(total + 3), aux(total + 3))

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.grammar_output = grammar_output
        if self.stage_output is not None:
            return self.stage_output
        return self.finish(list(self.execute_model_state.input_batch.req_ids))


class V1(ARModelRunnerV1Mixin, MockV1):  # type: ignore[misc]
    pass


class V2(ARModelRunnerV2Mixin, MockV2):  # type: ignore[misc]
    pass


def hidden(num_rows: int) -> torch.Tensor:
    return torch.arange(float(num_rows))[:, None].expand(num_rows, WIDTH).clone()


def aux(num_rows: int) -> list[torch.Tensor]:
    return [hidden(num_rows) + 100, hidden(num_rows) + 200]


def make(generation: Any, asynchronous: bool = False) -> Any:
    collector = HiddenStateCollector(LAYERS, (1, 2, LAYERS))
    return generation(collector, LayerTaps(LAYERS, (1, 2), installed=True), asynchronous)


def run(runner: Any, scheduled: SchedulerOutput, grammar_output: Any = None) -> ModelRunnerOutput:
    assert runner.execute_model(scheduled) is None
    output = runner.sample_tokens(grammar_output)
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


def entries(output: ModelRunnerOutput) -> dict[str, Any]:
    assert output.pooler_output is not None
    return {
        name: None if entry is None else entry[:, :, 0].tolist()
        for name, entry in zip(output.req_ids, output.pooler_output, strict=True)
    }


both = pytest.mark.parametrize("generation", [V1, V2])
both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@feature("DP padding", "V1", how="mocked")
@feature("DP padding", "V2", how="mocked")
@feature("async scheduling", "V1", how="mocked")
@feature("async scheduling", "V2", how="mocked")
@feature("mixed batches", "V2", how="mocked")
@both
@both_ways
def test_hidden_states_of_a_mixed_batch(generation: Any, asynchronous: bool) -> None:
    """Each request receives the hidden states of its own tokens and none of the padding's, whatever
    the batch order.
    """
    runner = make(generation, asynchronous)
    run(runner, scheduler_output(new=[new_request("old", "all", prompt_len=3)]))
    output = run(
        runner,
        scheduler_output(
            new=[
                new_request("plain", None, prompt_len=4),
                new_request("new", "all", prompt_len=3, layers=(-1, 2)),
            ],
            scheduled={"old": 1},
        ),
    )
    found = entries(output)
    order = output.req_ids
    first = {
        name: sum({"plain": 4, "new": 3, "old": 1}[n] for n in order[: order.index(name)])
        for name in order
    }
    assert found["plain"] is None
    assert found["old"] == [[first["old"]]]
    assert found["new"] == [[first["new"] + i, 200 + first["new"] + i] for i in range(3)]


@both
def test_a_batch_without_requests_for_hidden_states_is_unchanged(generation: Any) -> None:
    """If no request asks for hidden states, the runner returns vLLM's own output object and copies
    no hidden states.
    """
    runner = make(generation)
    runner.execute_model(scheduler_output(new=[new_request("r", None)]))
    runner._copy_hidden_states = None  # a call would fail
    output = runner.sample_tokens(None)
    assert output.pooler_output is None and runner.hidden_state_collector.bytes_copied == 0


@both
def test_a_step_without_requests_for_hidden_states_costs_four_calls(generation: Any) -> None:
    """A step without requests for hidden states makes only four calls to this package's functions
    and creates none of its objects, whatever the batch size.
    """
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(REPO / "vllm_omni"):
            calls.append(frame.f_code.co_name)

    runner = make(generation)
    names = [f"r{i}" for i in range(64)]
    runner.execute_model(scheduler_output(new=[new_request(name, None) for name in names]))
    runner.sample_tokens(None)
    decode = scheduler_output(scheduled=dict.fromkeys(names, 1))
    sys.setprofile(note)
    try:
        runner.execute_model(decode)
        runner.sample_tokens(None)
    finally:
        sys.setprofile(None)
    assert calls == ["execute_model", "update", "sample_tokens", "__bool__"]


@feature("speculative decoding (ngram)", "V2", how="mocked")
@feature(
    "speculative decoding (EAGLE-3, its layers)",
    "V1",
    how="mocked",
    note="only the last layer and the layers that the drafter reads",
)
@both
@both_ways
def test_rejected_drafts_have_no_hidden_states(generation: Any, asynchronous: bool) -> None:
    """Rejected draft tokens have no hidden states. Of the four speculative tokens in this test,
    only the two accepted ones have hidden states.
    """
    runner = make(generation, asynchronous)
    run(runner, scheduler_output(new=[new_request("r", "all")]))
    runner.sampled = {"r": [5, 6]}
    output = run(runner, scheduler_output(scheduled={"r": 4}, drafts={"r": [5, 7, 8]}))
    assert entries(output) == {"r": [[0.0], [1.0]]}


@feature("grammar masks (structured outputs)", "V2", how="mocked")
@both
def test_the_grammar_reaches_the_sampler(generation: Any) -> None:
    """The grammar mask for structured outputs is forwarded to the sampler unchanged."""
    runner = make(generation)
    grammar = object()
    run(runner, scheduler_output(new=[new_request("r", "all")]), grammar)
    assert runner.grammar_output is grammar


@both
def test_a_later_stage_receives_intermediate_tensors(generation: Any) -> None:
    """A later stage receives the intermediate tensors. V1 also accepts them as a positional
    argument.
    """
    received = IntermediateTensors({"hidden_states": torch.zeros(3, WIDTH)})
    runner = make(generation)
    runner.execute_model(
        scheduler_output(new=[new_request("r", "all")]), intermediate_tensors=received
    )
    assert runner.received is received
    if generation is V1:
        runner.execute_model(scheduler_output(scheduled={"r": 1}), received)
        assert runner.received is received


@both
def test_a_finished_request_is_evicted(generation: Any) -> None:
    """A finished request's state is removed when the next step's scheduler output reports the
    request as finished.
    """
    runner = make(generation)
    run(runner, scheduler_output(new=[new_request("r", "all"), new_request("other", None)]))
    output = run(runner, scheduler_output(scheduled={"other": 1}, finished=["r"]))
    assert output.pooler_output is None and not runner.hidden_state_collector


# The five faults of the first version


@pytest.mark.parametrize(
    ("generation", "state"),
    [(V1, None), (V2, None), (V2, StateV2(SimpleNamespace(req_ids=["r"]), None, None))],
)
@feature("pipeline parallelism (PP 2)", "V2", how="mocked")
def test_fault_1_earlier_stages_return_the_output_of_vllm(generation: Any, state: Any) -> None:
    """A stage that has no hidden states returns vLLM's output before any code reads hidden
    states.
    """
    runner = make(generation)
    runner.execute_model(scheduler_output(new=[new_request("r", "all")]))
    runner.execute_model_state = state
    runner.stage_output = ModelRunnerOutput([], {})
    assert runner.sample_tokens(None) is runner.stage_output
    assert (
        runner.stage_output.pooler_output is None
        and runner.hidden_state_collector.bytes_copied == 0
    )


@pytest.mark.parametrize("last", [False, True])
def test_fault_1_under_torchrun_every_stage_returns_hidden_states(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, the last stage broadcasts its hidden states to the other stages, because each
    stage has its own scheduler.
    """
    shown: list[torch.Tensor] = []

    def broadcast(values: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 1
        shown.append(values)
        # Layers are sent in ascending order.
        of_layer = hidden(len(values)) + (200 if len(shown) == 1 else 0)
        return values if last else values.copy_(of_layer)

    group = SimpleNamespace(is_last_rank=last, world_size=2, broadcast=broadcast)
    monkeypatch.setattr(ar_gpu_model_runner, "get_pp_group", lambda: group)
    runner = V1(HiddenStateCollector(LAYERS, (2, LAYERS)), LayerTaps(LAYERS, (2,), installed=True))
    runner.broadcast_pp_output = True
    runner.device = torch.device("cpu")
    runner.model_config = SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.float16)
    scheduled = scheduler_output(
        new=[new_request("r", "all", layers=(2, -1)), new_request("other", None, prompt_len=2)]
    )
    runner.execute_model(scheduled)
    states = hidden(8) if last else IntermediateTensors({"hidden_states": torch.zeros(8, WIDTH)})
    runner.execute_model_state = StateV1(scheduled, states, [hidden(8) + 200] if last else None)
    found = entries(runner.sample_tokens(None))
    assert found == {"r": [[200.0, 0.0], [201.0, 1.0], [202.0, 2.0]], "other": None}
    assert [len(values) for values in shown] == [5, 5], "no padding"
    assert last or {values.dtype for values in shown} == {torch.float16}, (
        "received hidden states have the model's dtype"
    )


@feature("speculative decoding (EAGLE-3, its layers)", "V2", how="mocked")
@both
def test_fault_2_a_drafter_receives_every_layer_that_it_reads(generation: Any) -> None:
    """A drafter receives every layer that it reads.

    EAGLE-3 reads auxiliary hidden states, so the sampler must receive the original state, list and
    tensor objects.
    """
    runner = make(generation)
    runner.execute_model(scheduler_output(new=[new_request("r", "all", layers=(1, -1))]))
    state, layers = runner.execute_model_state, runner.execute_model_state.aux_hidden_states
    runner.sample_tokens(None)
    assert (
        runner.seen[0] is state and runner.seen[0].aux_hidden_states is layers and len(layers) == 2
    )


@both
@both_ways
def test_fault_3_other_output_fields_do_not_change(generation: Any, asynchronous: bool) -> None:
    """All output fields except the pooler output (the NaN counters, for example) are still the
    objects that vLLM created.
    """
    runner = make(generation, asynchronous)
    runner.execute_model(scheduler_output(new=[new_request("r", "all")]))
    output = runner.sample_tokens(None)
    inner = output._inner.output if asynchronous else output
    before = {field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)}
    final = output.get_output() if asynchronous else output
    ignored = {"pooler_output", "sampled_token_ids"} if asynchronous else {"pooler_output"}
    for name in before.keys() - ignored:
        assert getattr(final, name) is before[name], name
    assert final.num_nans_in_logits == {"r": 3} and final.pooler_output is not None


@on_cpu
def test_fault_4_no_code_of_vllm_is_copied() -> None:
    """The workers call vLLM's `init_device` instead of copying it, and no six consecutive lines of
    vLLM code occur in this package's code.
    """
    assert "init_device" not in vars(ar_gpu_worker.ARGPUWorker)
    from vllm_omni.worker.ar import cpu_worker as ar_cpu_worker

    body = inspect.getsource(ar_cpu_worker.ARCPUWorker.init_device)
    assert "super().init_device()" in body and body.count("\n") <= 4
    theirs = {
        window
        for module in (gpu_worker, gpu_model_runner, v2_model_runner)
        for window in windows(inspect.getsource(module))
    }
    for module in (*OUR_MODULES, ar_cpu_worker):
        assert not [window for window in windows(inspect.getsource(module)) if window in theirs], (
            module.__name__
        )


def windows(source: str, length: int = 6) -> list[tuple[str, ...]]:
    """Return every sequence of `length` consecutive lines of code. Short lines, comments and
    imports are skipped.
    """
    lines = [line.strip() for line in source.splitlines()]
    lines = [
        line for line in lines if len(line) > 3 and not line.startswith(("#", "from ", "import "))
    ]
    return [tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)]


@pytest.mark.parametrize(
    "module", [*OUR_MODULES, vllm_omni.hidden_states], ids=lambda module: module.__name__
)
def test_fault_5_docstrings_name_existing_files_and_options(module: Any) -> None:
    """Docstrings do not promise a fallback, and every test file and option that they name
    exists.
    """
    tree = ast.parse(inspect.getsource(module))
    nodes = [
        n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    text = "\n".join(ast.get_docstring(node) or "" for node in nodes)
    assert not re.search(r"fall(s|ing)?[- ]?back", text, re.I)
    for path in re.findall(r"tests/[\w/]+\.py", text):
        assert (REPO / path).exists(), path
    for option in re.findall(r"`omni\.(\w+)`", text):
        assert option in vllm_omni.config.OmniConfig.__struct_fields__, option


def test_fault_5_every_mode_is_documented() -> None:
    """The field's documentation lists exactly the allowed values."""
    allowed = set(HiddenStatesRequest.__annotations__["hidden_states"].__args__)
    [definition] = ast.parse(inspect.getsource(HiddenStatesRequest)).body
    assert isinstance(definition, ast.ClassDef)
    [text] = [
        ast.unparse(below)
        for field, below in pairwise(definition.body)
        if "hidden_states:" in ast.unparse(field)
    ]
    assert set(re.findall(r"`(\w+)`", text)) == allowed


# The mocked runners have the same interface as vLLM's runners


def test_the_v1_runner_has_the_attributes_that_the_mixin_uses() -> None:
    """The installed vLLM has the state fields, batch fields and hooks that the V1 mixin uses."""
    assert set(StateV1._fields) <= set(gpu_model_runner.ExecuteModelState._fields)
    runner = gpu_model_runner.GPUModelRunner
    assert list(inspect.signature(runner.execute_model).parameters) == [
        "self",
        "scheduler_output",
        "intermediate_tensors",
    ]
    assert list(inspect.signature(runner.sample_tokens).parameters) == ["self", "grammar_output"]
    source = inspect.getsource(runner)
    for name in (
        "use_aux_hidden_state_outputs",
        "intermediate_tensors",
        "broadcast_pp_output",
        "max_num_tokens",
    ):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    batch = inspect.getsource(gpu_input_batch.InputBatch)
    assert "self.num_computed_tokens_cpu = " in batch and "def req_ids(self)" in batch


def test_the_v2_runner_has_the_attributes_that_the_mixin_uses() -> None:
    """The installed vLLM has the state fields, batch fields and hooks that the V2 mixin uses."""
    assert set(StateV2._fields) <= set(v2_model_runner.ExecuteModelState._fields)
    fields = {field.name for field in dataclasses.fields(v2_input_batch.InputBatch)}
    used = {
        "req_ids",
        "num_reqs",
        "query_start_loc_np",
        "num_computed_tokens_np",
        "num_draft_tokens_per_req",
    }
    assert used <= fields
    runner = v2_model_runner.GPUModelRunner
    assert list(inspect.signature(runner.execute_model).parameters)[:2] == [
        "self",
        "scheduler_output",
    ]
    assert list(inspect.signature(runner.sample_tokens).parameters) == ["self", "grammar_output"]
    source = inspect.getsource(runner)
    for name in (
        "use_aux_hidden_state_outputs",
        "intermediate_tensors",
        "pp_handler",
        "is_first_pp_rank",
        "use_pp",
    ):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name


@feature(
    "EPLB",
    "V1",
    how="mocked",
    note="the stock step that balances experts runs once per step; expert-parallel kernels "
    "need CUDA",
)
@feature("EPLB", "V2", how="mocked")
def test_experts_are_balanced_once_per_step() -> None:
    """Each mixin calls the stock `sample_tokens`, which runs the EPLB step, exactly once per
    step.
    """
    source = inspect.getsource(v2_model_runner)
    assert re.search(r"@step_eplb_after\(\)\s+def sample_tokens", source)
    assert (
        inspect.getsource(ARModelRunnerV2Mixin.sample_tokens).count("super().sample_tokens(") == 1
    )
    assert "self.eplb_step()" in inspect.getsource(gpu_model_runner.GPUModelRunner.sample_tokens)
    assert (
        inspect.getsource(ARModelRunnerV1Mixin.sample_tokens).count("super().sample_tokens(") == 1
    )


def test_the_cuda_worker_creates_its_runner_by_a_hook() -> None:
    """vLLM's CUDA worker creates its runner through the hook that `ARGPUWorker` overrides."""
    assert "self._make_model_runner()" in inspect.getsource(
        gpu_worker.Worker._init_workspace_and_model_runner
    )
    assert vars(ar_gpu_worker.ARGPUWorker).keys() & {
        "_make_model_runner",
        "init_device",
        "execute_model",
    } == {"_make_model_runner"}
