# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan`: computes the memory per GPU of a streaming model for each parallel split, and
shows measured speed and quality."""
