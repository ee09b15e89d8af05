# SPDX-License-Identifier: Apache-2.0
"""`OperatorFeatures`: operator features that all of this package's API servers have.

The features are `X-Request-Id` in responses and log lines, API key quotas (`omni.quotas`), trace
spans if vLLM exports traces, bounded memory, a single HTTP parser with header limits, origin checks
for browsers, and the policy for media URLs. The endpoint plugins for video models, hidden states
and speech attach these features.
"""

from pathlib import Path

from fastapi import FastAPI
from vllm.engine.protocol import EngineClient

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.limits import header_limits, media_policy
from vllm_omni.entrypoints.limits.access import OriginGuard
from vllm_omni.entrypoints.limits.quota_guard import QuotaGuard
from vllm_omni.entrypoints.limits.quotas import FileQuotas, QuotaFile, Quotas
from vllm_omni.entrypoints.telemetry import request_id, tracing
from vllm_omni.runtime.heap import collect_after_freeze


class OperatorFeatures:
    """The operator features of one API server process."""

    def __init__(self) -> None:
        self._guard = QuotaGuard()

    @property
    def quotas(self) -> Quotas:
        return self._guard.quotas

    def attach_to_app(self, app: FastAPI) -> None:
        """Add the middleware, limit request headers, and apply the policy for media URLs. This
        method must be called before the server starts.
        """
        media_policy.apply_media_policy()
        header_limits.limit_headers(app)
        # This middleware wraps the header limits, so even a request with oversized headers gets a
        # response that contains an id.
        request_id.add_request_ids(app)
        collect_after_freeze(app)
        app.add_middleware(self._guard.around)
        app.add_middleware(OriginGuard, origins=app.state.args.allowed_origins)

    async def start_serving(self, engine_client: EngineClient, omni: OmniConfig) -> None:
        """Start tracing if vLLM exports traces, and load the quota file if there is one. This
        method must be called before the server accepts requests.

        Raises:
            ValueError: The quota file is invalid. The message names the file.
        """
        if await engine_client.is_tracing_enabled():
            tracing.start_tracing()
        if omni.quotas is not None:
            self._guard.quotas = FileQuotas(QuotaFile.read_file(Path(omni.quotas)))
