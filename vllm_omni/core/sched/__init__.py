# SPDX-License-Identifier: Apache-2.0
"""Scheduler classes for `--scheduler-cls`."""

from vllm_omni.core.sched.ar_hidden_states_scheduler import ARHiddenStatesScheduler
from vllm_omni.core.sched.stream_batch_scheduler import StreamBatchScheduler

__all__ = ["ARHiddenStatesScheduler", "StreamBatchScheduler"]
