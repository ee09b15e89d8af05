# SPDX-License-Identifier: Apache-2.0
"""World models as environments for research: a gymnasium `VectorEnv` over vLLM's offline engine (extra `env`)."""
