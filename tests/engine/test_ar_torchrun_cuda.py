# SPDX-License-Identifier: Apache-2.0
"""The AR worker under torchrun, on two GPUs."""

from pathlib import Path

from ar_cuda import ON_TWO_GPUS
from ar_torchrun import run_two_ranks
from helpers.ar_compatibility import feature

TORCHRUN_LIMIT_S = 120

pytestmark = ON_TWO_GPUS


@feature("external launcher (torchrun, TP 2)", "V2")
def test_torchrun_tensor_parallel(cuda_language_model: Path, tmp_path: Path) -> None:
    """Under torchrun with tensor parallelism, every rank runs its own engine and returns the same
    hidden states.
    """
    torchrun(cuda_language_model, tmp_path, "tensor_parallel_size", "V2")


def test_torchrun_tensor_parallel_on_v1(cuda_language_model: Path, tmp_path: Path) -> None:
    torchrun(cuda_language_model, tmp_path, "tensor_parallel_size", "V1")


def test_torchrun_pipeline_parallel_on_v1(cuda_language_model: Path, tmp_path: Path) -> None:
    """Under torchrun with pipeline parallelism, the last stage broadcasts hidden states to the
    first stage over NCCL.

    Stock vLLM supports this only with its V1 model runner.
    """
    torchrun(cuda_language_model, tmp_path, "pipeline_parallel_size", "V1")


def torchrun(cuda_language_model: Path, tmp_path: Path, parallel: str, runner: str) -> None:
    use_v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
    run_two_ranks(
        TORCHRUN_SCRIPT, tmp_path, [str(cuda_language_model), parallel], TORCHRUN_LIMIT_S, **use_v2
    )


TORCHRUN_SCRIPT = """
import sys
from pathlib import Path
from ar_cuda import PROMPTS, SHARED_GPU, Reference
from ar_engine import params, running_llm
from ar_torchrun import report_success, step
from helpers.programs import limited_rank
from vllm_omni.hidden_states import hidden_states_of

if __name__ == "__main__":
    limited_rank()
    step("imports")
    model, parallel = Path(sys.argv[1]), sys.argv[2]
    fields = {**SHARED_GPU, "dtype": "bfloat16", "distributed_executor_backend": "external_launcher"}
    with running_llm(model, {"hidden_state_layers": [2]}, seed=0, **fields, **{parallel: 2}) as llm:
        step("start")
        asked = [params("all", (2, -1)), params("generated"), params(None)]
        outputs = llm.generate([*PROMPTS[:2], PROMPTS[0]], asked, use_tqdm=False)
        step("texts")
        reference = Reference(model)
        reference.check(outputs[0], layers=(2, -1))
        reference.check(outputs[1], "generated")
        assert hidden_states_of(outputs[2]) is None
        report_success()
"""  # noqa: E501
