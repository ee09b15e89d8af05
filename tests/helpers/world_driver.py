# SPDX-License-Identifier: Apache-2.0
"""`WorldDriver` runs one model family's worlds in this process, as the runner does.

It runs them chunk by chunk, without an engine. Its checks verify properties that every world must
have.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from helpers.chunks import assert_same, run_request, run_stages, session_bits, step

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.outputs import RequestFailed

Chunks = Sequence[dict[str, Any]]
Tensors = Mapping[str, torch.Tensor]


def random_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8, generator=generator)


BAD_REQUESTS: Final[list[tuple[bool, dict[str, torch.Tensor], dict[str, Any], str, str]]] = [
    (True, {"image": torch.zeros(3, 8, 8)}, {}, "invalid_image", "uint8 of shape"),
    (False, {"image": random_image()}, {}, "invalid_image", "has one start image"),
    (False, {}, {"actions": [["w"]] * 4}, "invalid_action", "at most 3 entries"),
]
"""Requests that every world with a start image must refuse, as arguments for `assert_refused`."""


class WorldDriver:
    """Runs and checks one model family's worlds.

    Args:
        model: Model class.
        setup: The model's setup class.
        checkpoint: Module that contains the family's `find_layout` and `hf_config`.
        family: Family name.
        size: Frame height and width in pixels.
        tensors: Tensors for a session's first chunk.
        params: Parameters for a session and its first chunk.
    """

    def __init__(
        self,
        model: Any,
        setup: Any,
        checkpoint: ModuleType,
        family: str,
        size: tuple[int, int],
        tensors: Tensors | None = None,
        params: dict[str, Any] | None = None,
    ) -> None:
        self._model, self._setup = model, setup
        self._checkpoint, self._family = checkpoint, family
        self._size, self._tensors, self._params = size, tensors or {}, params or {}

    def load_world(
        self,
        checkpoint: Path,
        parallel: ParallelContext | None = None,
        kv_dtype: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
        omni: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        height, width = self._size
        config = OmniConfig(height=height, width=width, model=options, **(omni or {}))
        layout = self._checkpoint.find_layout(checkpoint)
        values = self._checkpoint.hf_config(checkpoint)[self._family]
        setup = self._setup.of_checkpoint(
            values, layout, config, dtype, parallel or ParallelContext(), kv_dtype=kv_dtype
        )
        world = self._model(setup)
        world.load_checkpoint(layout)
        return world

    def open_session(self, world: Any, session_id: str = "a", **params: Any) -> Any:
        return world.new_session(DiffusionParams(session_id=session_id, **self._params | params))

    def make_request(self, session: Any, tensors: Tensors | None = None, **params: Any) -> Any:
        """Return the request for a chunk. A session's first chunk uses the driver's tensors and
        parameters.
        """
        tensors = dict(tensors or {})
        if session.chunk_index == 0:
            tensors, params = {**self._tensors, **tensors}, self._params | params
        return DiffusionRequest(
            "request", DiffusionParams(session_id=session.session_id, **params), tensors, session
        )

    def run_chunk(
        self, world: Any, session: Any, tensors: Tensors | None = None, **params: Any
    ) -> torch.Tensor:
        """Run the session's next chunk, and return its frames or latents."""
        _, result = run_request(world, self.make_request(session, tensors, **params))
        return next(iter(result.values())).clone()

    def latents_of(self, world: Any, chunks: Chunks, **params: Any) -> torch.Tensor:
        """Return a session's latents. `chunks` contains the `make_request` arguments for each
        chunk.
        """
        session = self.open_session(world, output="latents")
        parts = [
            self.run_chunk(world, session, output="latents", **params, **chunk) for chunk in chunks
        ]
        return torch.cat(parts, dim=1)

    def latents_of_stages(self, stages: Sequence[Any], chunks: Chunks) -> torch.Tensor:
        """Return the latents of a session run on pipeline stages. Each stage has its own copy of
        the session.
        """
        sessions = [self.open_session(world, output="latents") for world in stages]
        latents = []
        for chunk in chunks:
            requests = [self.make_request(each, output="latents", **chunk) for each in sessions]
            latents.append(run_stages(stages, requests)[1]["latents"].clone())
        return torch.cat(latents, dim=1)

    # -- checks ------------------------------------------------------------------------------------

    def assert_refused(
        self,
        world: Any,
        first: bool,
        tensors: Tensors,
        params: dict[str, Any],
        code: str,
        reason: str,
    ) -> None:
        """Assert that a request for the first or second chunk is refused and does not change the
        session.
        """
        session = self.open_session(world)
        if not first:
            self.run_chunk(world, session)
        before = session_bits(session)
        with pytest.raises(RequestFailed, match=reason) as refused:
            world.prepare_encode(self.make_request(session, tensors, **params))
        assert refused.value.code == code
        assert_same(session, before)

    def assert_needs_an_image(self, world: Any) -> None:
        """Assert that a first chunk without tensors is refused."""
        request = self.make_request(self.open_session(world))
        request.tensors = {}
        with pytest.raises(RequestFailed, match="needs an image") as refused:
            world.prepare_encode(request)
        assert refused.value.code == "missing_image"

    def assert_aborts_leave_no_trace(self, world: Any, chunks: int, aborts: Sequence[int]) -> None:
        """Assert that an aborted chunk changes nothing: the next chunk is the same as in a session
        without aborts.

        After `chunks` chunks, a chunk is aborted in one session for each number of steps in
        `aborts`. A chunk that is aborted after its last step is decoded before the abort.
        """
        start = self.open_session(world)
        for _ in range(chunks):
            self.run_chunk(world, start, actions=[["w"]])
        expected = self.run_chunk(world, start.fork("twin"))
        for steps in aborts:
            session = start.fork(f"abandoned at {steps}")
            before = session_bits(session)
            abandoned = self.make_request(session, seed=9, actions=[["k", "d"]] * 3)
            world.prepare_encode(abandoned)
            for _ in range(steps):
                step(world, [abandoned])
            if steps == abandoned.num_steps:
                world.post_decode(abandoned)
            assert_same(session, before)
            assert torch.equal(self.run_chunk(world, session), expected), steps

    def assert_forks_are_independent(self, world: Any, chunks: int, actions: list[Any]) -> None:
        """Assert that a fork made after some chunks is bit-identical to its source, and that
        different actions change only the fork.
        """
        session = self.open_session(world)
        for _ in range(chunks):
            self.run_chunk(world, session, actions=actions)
        fork, before = session.fork("b"), session_bits(session)
        assert fork.nbytes == session.nbytes
        assert_same(fork, before)
        other = self.run_chunk(world, fork, actions=actions[::-1])
        assert_same(session, before)
        assert not torch.equal(self.run_chunk(world, session, actions=actions), other)

    def assert_moves_to_the_host_and_back(self, world: Any, chunks: int = 1) -> None:
        """Assert that a session moved to host memory and back continues like a session that was not
        moved.
        """
        session = self.open_session(world)
        for _ in range(chunks):
            self.run_chunk(world, session)
        twin = session.fork("twin")
        session.to("cpu")
        assert torch.equal(self.run_chunk(world, session), self.run_chunk(world, twin))
