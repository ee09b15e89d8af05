# SPDX-License-Identifier: Apache-2.0
"""A small discrete-event model of one or more streams on pipeline stages and a VAE: schedules that need not exist yet.

A chunk is `denoise` passes, a clean one more if strict, and a decode; a pass visits the stages in order. Ranks are
serial; of the passes that can start earliest, they take the oldest chunk's. `strict`: a chunk needs the previous one's
clean pass, stage by stage. `matched`: step j needs step j of the chunk before. Held by tests/planning/test_simulate.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Op = tuple[int, int, int, int]
"""(stream, chunk, pass, stage); the decode is pass -1."""


@dataclass(frozen=True)
class Pipeline:
    """Milliseconds. pass_ms: one pass on one rank holding all layers. vae_rank: the decode has a rank of its own, else
    it runs on the last stage. streams: at once. in_flight: chunks of one stream between its first pass and its last.
    """

    pass_ms: float
    decode_ms: float
    stages: int = 1
    denoise: int = 4
    strict: bool = True
    vae_rank: bool = False
    streams: int = 1
    hop_ms: float = 0.1
    in_flight: int = 1

    @property
    def passes(self) -> int:
        return self.denoise + self.strict


def chunk_period_ms(pipeline: Pipeline, chunks: int = 16) -> float:
    """Steady milliseconds between two decoded chunks of all streams together."""
    ends = _schedule(pipeline, chunks)
    done = sorted(ends[stream, chunk, -1, 0] for stream in range(pipeline.streams) for chunk in range(chunks))
    first, burst = len(done) // 3, pipeline.in_flight * pipeline.streams  # so many may end close to each other
    last = first + (len(done) - 1 - len(done) // 6 - first) // burst * burst
    return (done[last] - done[first]) / (last - first)


def _needs(pipeline: Pipeline, op: Op) -> Sequence[tuple[Op, float]]:
    """(op, delay) pairs that must end before `op` starts."""
    stream, chunk, index, stage = op
    last, hop = pipeline.stages - 1, pipeline.hop_ms if pipeline.stages > 1 else 0.0
    if index == -1:
        before = [((stream, chunk, pipeline.denoise - 1, last), pipeline.hop_ms if pipeline.vae_rank else 0.0)]
        return before + ([((stream, chunk - 1, -1, 0), 0.0)] if chunk else [])
    needs: list[tuple[Op, float]] = []
    if stage:
        needs.append(((stream, chunk, index, stage - 1), hop))
    elif index:
        needs.append(((stream, chunk, index - 1, last), hop))
    if chunk and pipeline.strict and index == 0:
        needs.append(((stream, chunk - 1, pipeline.denoise, stage), 0.0))
    if chunk and not pipeline.strict:
        needs.append(((stream, chunk - 1, index, stage), 0.0))
    if index == 0 and stage == 0 and chunk >= pipeline.in_flight and not pipeline.strict:
        needs.append(((stream, chunk - pipeline.in_flight, pipeline.denoise - 1, last), 0.0))
    return needs


def _schedule(pipeline: Pipeline, chunks: int) -> dict[Op, float]:
    """The end of every op."""
    stages = range(pipeline.stages)
    waiting = {
        (stream, chunk, index, stage)
        for stream in range(pipeline.streams)
        for chunk in range(chunks)
        for index in range(-1, pipeline.passes)
        for stage in (range(1) if index == -1 else stages)
    }
    needs = {op: _needs(pipeline, op) for op in waiting}
    vae = pipeline.stages if pipeline.vae_rank else pipeline.stages - 1
    free = [0.0] * (pipeline.stages + 1)
    ends: dict[Op, float] = {}
    while waiting:
        ready = [op for op in waiting if all(before in ends for before, _ in needs[op])]

        def key(op: Op) -> tuple[float, int, int, int, int]:
            rank = vae if op[2] == -1 else op[3]
            start = max([free[rank], *(ends[before] + delay for before, delay in needs[op])])
            return (start, op[1], -op[2] if op[2] >= 0 else -99, op[3], op[0])

        chosen = min(ready, key=key)
        rank = vae if chosen[2] == -1 else chosen[3]
        spent = pipeline.decode_ms if chosen[2] == -1 else pipeline.pass_ms / pipeline.stages
        free[rank] = ends[chosen] = key(chosen)[0] + spent
        waiting.remove(chosen)
    return ends
