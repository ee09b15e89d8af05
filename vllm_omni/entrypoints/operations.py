# SPDX-License-Identifier: Apache-2.0
"""`Operations`: operators' features of every API server of this package, for every kind of model.

`X-Request-Id` on every answer and in log lines, quotas of keys (`omni.quotas`), spans if vLLM exports its own, memory
that does not grow with visits, one HTTP parser with bounds of headers, the check of browsers' origins and the policy
for media by URL. Attached by the endpoint plugins of video models, hidden states and speech. Held by
tests/entrypoints/realtime/test_operators_served.py, tests/entrypoints/test_hidden_states_served.py and
speech/test_speech_served.py.
"""

from pathlib import Path

from fastapi import FastAPI
from vllm.engine.protocol import EngineClient

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints import header_limits, media_policy, request_id, tracing
from vllm_omni.entrypoints.access import OriginGuard
from vllm_omni.entrypoints.http_parser import use_h11
from vllm_omni.entrypoints.quota_guard import QuotaGuard
from vllm_omni.entrypoints.quotas import FileQuotas, QuotaFile, Quotas
from vllm_omni.heap import collect_after_freeze


class Operations:
    """Those of one API server process."""

    def __init__(self) -> None:
        self._guard = QuotaGuard()

    @property
    def quotas(self) -> Quotas:
        return self._guard.quotas

    def attach(self, app: FastAPI) -> None:
        """Add the middleware, before the server starts."""
        media_policy.apply()
        use_h11(app)
        request_id.attach(app)
        header_limits.attach(app)
        collect_after_freeze(app)
        app.add_middleware(self._guard.around)
        app.add_middleware(OriginGuard, origins=app.state.args.allowed_origins)

    async def start(self, engine_client: EngineClient, omni: OmniConfig) -> None:
        """Apply the options, before the server serves. Raises ValueError, naming the file of quotas."""
        if await engine_client.is_tracing_enabled():
            tracing.start()
        if omni.quotas is not None:
            self._guard.quotas = FileQuotas(QuotaFile.read(Path(omni.quotas)))
