# SPDX-License-Identifier: Apache-2.0
"""World models as research environments: a gymnasium `VectorEnv` over vLLM's offline engine or a
server.

This package requires the optional dependencies of the `env` extra.
"""

import importlib.util

if importlib.util.find_spec("gymnasium") is None:
    raise ModuleNotFoundError(
        "vllm_omni.environments needs gymnasium: pip install '.[env]' in the checkout",
        name="gymnasium",
    )
