# SPDX-License-Identifier: Apache-2.0
"""Importing the package changes no vLLM attribute, and registering only adds entries to registries.

All modules, including those with Triton kernels, can be imported without Triton, which is missing
on most machines that have no GPU.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.waits import seconds

PACKAGE = Path(__file__).parents[1] / "vllm_omni"
EXAMPLES = PACKAGE.parent / "examples" / "online_serving"
SNAPSHOT = """
import importlib, json, sys
from importlib.machinery import PathFinder

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTriton
import vllm, vllm.v1.core.sched.scheduler, vllm.v1.worker.gpu_worker, vllm.v1.engine.core, vllm.v1.engine.async_llm
import vllm.model_executor.models.config, vllm.model_executor.models.registry, vllm.transformers_utils.config
import vllm.model_executor.layers.pooler, vllm.entrypoints.openai.api_server, vllm.sequence, vllm.inputs
import vllm.model_executor.models.interfaces, vllm.model_executor.model_loader, vllm.v1.outputs, vllm.pooling_params

def objects():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == "vllm" or module_name.startswith("vllm.")):
            continue
        for name, value in list(vars(module).items()):
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                found.update({(module_name, f"{name}.{attr}"): inner for attr, inner in list(vars(value).items())})
    return found

def changed(before, after):
    return sorted(".".join(key) for key, value in before.items() if key not in after or after[key] is not value)

def contents():
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER
    from transformers import CONFIG_MAPPING
    return {"types": {name: None for name in CONFIG_MAPPING}, "models": dict(ModelRegistry.models),
            "hooks": dict(MODELS_CONFIG_MAP), "parsers": dict(_CONFIG_FORMAT_TO_CONFIG_PARSER)}
"""  # noqa: E501


WALK = """
before, entries = objects(), contents()
import pkgutil, vllm_omni, vllm_omni.registration
from vllm_omni.model_executor.models.registry import AR_ARCHITECTURES, ARCHITECTURES
vllm_omni.register()
vllm_omni.register()
registered, new = objects(), contents()
names = [m.name for m in pkgutil.walk_packages(vllm_omni.__path__, "vllm_omni.")]
imported, kernels = 0, {}
for name in names:
    if name.endswith(".cpu_worker"):
        continue
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "aiortc":  # of the extra `webrtc`
            raise
        continue
    kernels[name] = sorted(vars(module)) if "triton" in vars(module) else []
    imported += 1
# A submodule imported for the first time becomes an attribute of its package: an addition, not a change.
print(json.dumps({
    "checked": len(before),
    "imported": imported,
    "kernels": kernels,
    "triton": "triton" in sys.modules,
    "changed_by_importing": changed(registered, objects()),
    "changed_by_registering": changed(before, registered),
    "added": {kind: sorted(set(new[kind]) - set(entries[kind])) for kind in new},
    "replaced": [key for kind in new for key in entries[kind] if new[kind].get(key) is not entries[kind][key]],
    "architectures": sorted(ARCHITECTURES),
    "for_stock_models": sorted(
        name for name, hook in new["hooks"].items() if hook is vllm_omni.registration.LanguageModelConfig
    ),
    "autoregressive": sorted(AR_ARCHITECTURES),
}))
"""  # noqa: E501


@pytest.fixture(scope="module")
def walk() -> dict[str, object]:
    """Register the plug-in and import all modules in another process, and return what has
    changed.
    """
    output = subprocess.run(
        [sys.executable, "-c", SNAPSHOT + WALK],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(600),
    ).stdout
    return json.loads(output.splitlines()[-1])


def test_importing_every_module_rebinds_nothing_in_vllm(walk: dict[str, Any]) -> None:
    """After this package's modules are imported, every attribute of every loaded vLLM module and
    class is still the same object as before.

    The CPU worker modules are excluded, because they import vLLM's CPU worker, which patches torch.
    """
    assert walk["changed_by_importing"] == []
    assert walk["imported"] > 20 and walk["checked"] > 5000


def test_registering_touches_four_registries_and_only_adds(walk: dict[str, Any]) -> None:
    """Two calls to `register()` add architectures, config hooks, config types and a config parser.

    No registered entry is replaced. vLLM architectures without a config hook get a hook that acts
    only if one of this package's workers is selected.
    """
    assert walk["changed_by_registering"] == [] and walk["replaced"] == []
    assert "Qwen2ForCausalLM" in walk["for_stock_models"]
    assert walk["added"] == {
        "models": sorted(walk["architectures"] + walk["autoregressive"]),
        "hooks": sorted(walk["architectures"] + walk["for_stock_models"]),
        "types": ["null_image", "null_world", "omni_pipeline", "t2v", "ti2v"],
        "parsers": ["omni"],
    }


def test_kernel_files_are_imported_without_triton(walk: dict[str, Any]) -> None:
    """Modules with kernels can be imported without Triton, because they import Triton only through
    `triton_or_names`.
    """
    files = [path for path in PACKAGE.rglob("*.py") if "@triton.jit" in path.read_text()]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    assert len(names) >= 3 and not walk["triton"]
    for path, name in zip(files, names, strict=True):
        made = re.findall(r"^@triton\.jit.*\ndef (\w+)\(", path.read_text(), re.M)
        assert made and set(made) <= set(walk["kernels"][name]), name


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import vllm_omni`, which every vLLM process runs, imports neither torch nor vLLM.

    The table of model families, which commands read, does not import the families either.
    """
    load = "import sys, json, vllm_omni, vllm_omni.model_executor.models.registry"
    script = f"{load}; print(json.dumps([m for m in ('torch', 'vllm') if m in sys.modules]))"
    output = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(300),
    )
    assert json.loads(output.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("client", ["world_camera.py", "realtime_video.py"])
def test_clients_need_no_torch(client: str) -> None:
    """Clients do not import torch, so they start in 0.2 s. Importing torch would add another
    second.
    """
    path = EXAMPLES / client
    script = (
        f"import sys, runpy; runpy.run_path({str(path)!r}); print('torch' in sys.modules, "
        "'numpy' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(300),
    )
    assert output.stdout.split() == ["False", "True"]


def test_a_process_that_tests_cuda_cannot_import_the_cpu_worker() -> None:
    """After `refuse_cpu_worker`, an import of vLLM's CPU worker fails with the reason, and torch is
    unchanged. Without it, the import replaces torch's events.
    """
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); from helpers import cpu_build\n"
        "if sys.argv[2] == 'refuse': cpu_build.refuse_cpu_worker()\n"
        "try: import vllm.v1.worker.cpu_worker\n"
        "except ImportError as error: print(error)\n"
        "print(torch.cuda.Event.__module__)"
    )

    def run(refused: str) -> list[str]:
        command = [sys.executable, "-c", program, str(PACKAGE.parent / "tests"), refused]
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=seconds(120)
        )
        return output.stdout.splitlines()

    assert run("allow")[-1] == "vllm.v1.worker.cpu.shm"
    reason, module = run("refuse")[-2:]
    assert "replaces torch.cuda's streams and events" in reason and "on_cpu" in reason
    assert module == "torch.cuda.streams"
