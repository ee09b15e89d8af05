# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan`: computes a streaming model's memory use per GPU for each parallel split, and
shows measured speed and quality.
"""
