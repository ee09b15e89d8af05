# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan`: memory of a streaming model per GPU and split, and measured results."""
