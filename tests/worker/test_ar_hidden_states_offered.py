# SPDX-License-Identifier: Apache-2.0
"""Tests of which layers' hidden states an engine offers.

The engine configuration determines these layers when the model is loaded.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.worker.ar import runner as module
from vllm_omni.worker.ar.layers import LayerTaps
from vllm_omni.worker.ar.worker import ARWorkerMixin, check_model

SCHEDULER = "vllm_omni.core.sched.ARHiddenStatesScheduler"
TAPS = LayerTaps(4, (1, 2), installed=True)


def config(scheduler: str | None = SCHEDULER, speculative: Any = None, **changed: Any) -> Any:
    """Return the `VllmConfig` fields that the tested code reads. `changed` replaces some of these
    fields.
    """
    from vllm.config import SchedulerConfig

    def part(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: changed.get(name, value) for name, value in fields.items()})

    scheduler_config = SchedulerConfig.default_factory(max_num_seqs=1, scheduler_cls=scheduler)
    return SimpleNamespace(
        model_config=part(
            is_encoder_decoder=False, is_diffusion=False, architecture="Qwen2ForCausalLM"
        ),
        cache_config=part(kv_sharing_fast_prefill=False),
        parallel_config=part(prefill_context_parallel_size=1, distributed_executor_backend="mp"),
        scheduler_config=scheduler_config,
        speculative_config=speculative,
    )


@pytest.fixture
def tensor_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(module, "get_tp_group", lambda: group)
    return group


def test_the_final_layer_and_retained_layers_are_offered(tensor_rank: SimpleNamespace) -> None:
    """The engine offers the final layer and every layer that the taps retain."""
    collector = module._make_collector(config(), TAPS)
    assert (collector.num_layers, collector.layers, collector.refusal) == (4, {1, 2, 4}, None)
    assert collector.copies


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_a_worker_requires_the_hidden_states_scheduler(
    scheduler: str | None,
) -> None:
    """The worker refuses to start with any other scheduler, because clients would then receive
    neither hidden states nor an error.
    """
    with pytest.raises(ValueError, match=f"ARGPUWorker requires --scheduler-cls {SCHEDULER}$"):
        check_model(config(scheduler))
    check_model(config())


def test_the_language_model_worker_refuses_a_diffusion_model() -> None:
    """The language model worker refuses a diffusion model with a one-line error that names the
    worker to use.
    """
    world = config()
    world.model_config.architecture = "LingBotWorldPipeline"
    with pytest.raises(
        ValueError, match=r"needs vllm_omni\.worker\.DiffusionGPUWorker: drop the flag$"
    ):
        check_model(world)


@pytest.mark.parametrize(("backend", "copies"), [("mp", False), ("external_launcher", True)])
def test_tensor_parallel_ranks_copy_only_for_a_scheduler(
    tensor_rank: SimpleNamespace, backend: str, copies: bool
) -> None:
    """Only the first tensor-parallel rank copies hidden states.

    Under torchrun, every rank copies hidden states, because each rank has a scheduler.
    """
    tensor_rank.rank_in_group = 1
    assert (
        module._make_collector(config(distributed_executor_backend=backend), TAPS).copies is copies
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_diffusion": True}, "diffusion language models"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        (
            {"speculative": SimpleNamespace(enable_adaptive_verification=True)},
            "adaptive verification",
        ),
    ],
)
def test_unsupported_configurations_state_the_reason(
    tensor_rank: SimpleNamespace, changed: dict[str, Any], named: str
) -> None:
    """In configurations where hidden states would be missing or shifted, requests for hidden states
    are refused with the reason.
    """
    refusal = module._make_collector(config(**changed), TAPS).refusal
    assert refusal is not None and named in refusal


def test_statistics_report_layers_and_copied_bytes(tensor_rank: SimpleNamespace) -> None:
    """Statistics contain the offered layers and the number of bytes that this rank has copied."""
    tensor_rank.rank_in_group = 1
    collector = module._make_collector(config(), TAPS)
    collector.bytes_copied = 7
    worker = SimpleNamespace(model_runner=SimpleNamespace(hidden_state_collector=collector))
    assert ARWorkerMixin.hidden_states_stats(worker) == {
        "bytes_copied": 7,
        "layers": [1, 2, 4],
        "num_layers": 4,
        "delivers": False,
        "runner": "SimpleNamespace",
    }
