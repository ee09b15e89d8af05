# SPDX-License-Identifier: Apache-2.0
"""Once imported, vLLM looks at a class of models in this process and in those that are forked from
it.

By itself it starts a python for each class whose file it has not seen yet, which imports everything
anew, 5 to 10 s of processor time, so that CUDA stays unused in its own. Imported where there is
none (quick_workers.py).
Held by tests/test_quick_workers.py.
"""

from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda inspect: inspect()
