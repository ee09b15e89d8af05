# SPDX-License-Identifier: Apache-2.0
"""Ranks trade tokens for heads and back; rounding before the exchange gives the bits of rounding
behind it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.fp8_product import as_on_hopper
from helpers.rank_processes import run_ranks
from helpers.shared_peers import SharedPeers
from helpers.triton_interpreter import interpret
from helpers.waits import pause

from vllm_omni.model_executor.layers import cuda_graphs
from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.collectives.head_all_to_all import (
    CollectiveHeadAllToAll,
    PeerHeadAllToAll,
    head_all_to_all,
    heads_to_tokens,
    tokens_to_heads,
)
from vllm_omni.model_executor.layers.collectives.head_exchange import (
    HeadExchange,
    QuantizedExchange,
    QuantizedQueriesExchange,
    head_exchange,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.collectives.peer_memory import PeerMemory
from vllm_omni.model_executor.layers.kv_cache.format import FP8
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.quantization import fp8_kernels

LAYERS, HEADS, CHUNK, RANKS = 2, 4, 3, 2
WINDOW, CHUNKS = 7, 4


@dataclass(frozen=True)
class Sizes:
    """tokens: of a frame. offsets: by how many chunks each session is ahead."""

    tokens: int
    offsets: tuple[int, ...] = (0,)
    dim: int = 16
    device: str = "cpu"


@dataclass(frozen=True)
class Row:
    window: KVWindow
    frames: range


@contextmanager
def group(
    rank: int, rendezvous: str, backend: str = "gloo", *, peers: bool = False
) -> Iterator[ParallelContext]:
    """peers: whether ranks write into each other's memory."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    try:
        memory: PeerMemory | None = None
        if peers:
            memory = SharedPeers(rendezvous) if backend == "gloo" else PeerMemory(dist.group.WORLD)
        yield ParallelContext(rank, RANKS, dist.group.WORLD, sequence_parallel=True, peers=memory)
    finally:
        dist.destroy_process_group()


def make_window(heads: int, sizes: Sizes, storage: torch.dtype | None = FP8) -> KVWindow:
    return KVWindow(
        num_layers=LAYERS,
        window_frames=WINDOW,
        sink_frames=2,
        tokens_per_frame=sizes.tokens,
        num_heads=heads,
        head_dim=sizes.dim,
        dtype=torch.bfloat16,
        device=sizes.device,
        storage=storage,
    )


def projected(
    rows: list[Row], layer: int, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all tokens and heads, [B, T, N, H]; head n has keys 30^n times as
    large. Values are a part of a wider tensor."""
    per_row = []
    for number, row in enumerate(rows):
        generator = torch.Generator().manual_seed(1000 * number + 10 * row.frames.start + layer)
        per_row.append(torch.randn(sizes.tokens * CHUNK, HEADS, 3 * sizes.dim, generator=generator))
    q, k, v = torch.stack(per_row).to(sizes.device).chunk(3, dim=-1)
    factors = 30.0 ** (torch.arange(HEADS, device=sizes.device)[:, None] - 1)
    wider = torch.cat((v, v), dim=2).bfloat16()
    return (q / factors).bfloat16(), (k * factors).bfloat16(), wider[:, :, HEADS:]


def play(
    parallel: ParallelContext, sizes: Sizes, *, ahead: bool, chunks: int = CHUNKS
) -> tuple[list[torch.Tensor], list[KVWindow], list[type[HeadExchange]]]:
    """Attention's results of this rank's tokens, the windows, and each forward's kind of exchange,
    of `chunks` chunks.

    ahead: whether numbers may be rounded before the exchange.
    """
    windows = [make_window(HEADS // parallel.size, sizes) for _ in sizes.offsets]
    results, kinds = [], []

    def chunk(rows: list[Row]) -> None:
        num_tokens = sizes.tokens * CHUNK
        exchange = (
            head_exchange(parallel, rows, num_tokens)
            if ahead
            else HeadExchange(parallel, num_tokens)
        )
        kinds.append(type(exchange))
        own = parallel.token_slice(num_tokens)
        for layer in range(LAYERS):
            q, k, v = (x[:, own] for x in projected(rows, layer, sizes))
            attended = exchange.attend(rows, layer, q, k, v, write_only=False)
            assert attended is not None and attended.shape == q.shape
            results.append(attended.clone())  # the next call may use its memory
        q, k, v = (x[:, own] for x in projected(rows, 0, sizes))
        assert exchange.attend(rows, 0, q, k, v, write_only=True) is None

    for window, offset in zip(windows, sizes.offsets, strict=True):
        for number in range(offset):
            chunk([Row(window, range(CHUNK * number, CHUNK * (number + 1)))])
    for number in range(chunks):
        starts = [CHUNK * (number + offset) for offset in sizes.offsets]
        chunk([Row(window, range(s, s + CHUNK)) for window, s in zip(windows, starts, strict=True)])
    return results, windows, kinds


class AtOnce(cuda_graphs._Recording):
    """A capture as far as memory goes: what lies between graphs is shared, and nothing waits for
    a replay.
    """

    def break_for(self, run: Callable[[], object]) -> None:
        run()


@contextmanager
def in_a_capture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "_recording", AtOnce(None, {}))
        yield


def compare(parallel: ParallelContext, sizes: Sizes, *, hopper: bool, chunks: int = CHUNKS) -> None:
    """hopper: whether attention is to multiply in FP8."""
    found, windows, kinds = play(parallel, sizes, ahead=True, chunks=chunks)
    wanted, other_windows, _ = play(parallel, sizes, ahead=False, chunks=chunks)
    with in_a_capture():
        captured = [play(parallel, sizes, ahead=ahead, chunks=chunks)[0] for ahead in (True, False)]
    for ours, *others in zip(found, wanted, *captured, strict=True):
        assert all(torch.equal(ours, other) for other in others)
    for ours, theirs in zip(windows, other_windows, strict=True):
        assert torch.equal(ours.buffer.view(torch.uint8), theirs.buffer.view(torch.uint8))
        assert torch.equal(ours.scales, theirs.scales)
    quantized, offsets = QuantizedQueriesExchange if hopper else QuantizedExchange, sizes.offsets
    first = 1 if 0 in offsets else 0
    assert [kind for kind in kinds if kind is not HeadExchange] == [quantized] * (
        chunks - first + max(sum(offsets) - 1, 0)
    )
    assert kinds[-1] is quantized
    # elsewhere kernels may sum in another order for other numbers of heads
    if sizes.device == "cpu":
        one_rank, _, _ = play(ParallelContext(), sizes, ahead=True, chunks=chunks)
        own = parallel.token_slice(sizes.tokens * CHUNK)
        for ours, whole in zip(found, one_rank, strict=True):
            assert torch.equal(ours, whole[:, own])


def _compare(rank: int, rendezvous: str, hopper: bool, peers: bool) -> None:
    with (
        group(rank, rendezvous, peers=peers) as parallel,
        as_on_hopper() if hopper else nullcontext(),
    ):
        for sizes in (Sizes(6), Sizes(3), Sizes(5, (2, 0))):
            compare(parallel, sizes, hopper=hopper)


@pytest.mark.parametrize("peers", [False, True], ids=["sent", "written"])
@pytest.mark.parametrize("hopper", [False, True], ids=["products in bf16", "products in FP8"])
def test_rounded_before_the_exchange_as_behind_it(
    hopper: bool, peers: bool, tmp_path: Path
) -> None:
    """As on one rank, and in a capture: one session, an odd number of tokens, a batch of
    sessions at other chunks.
    """
    run_ranks(_compare, (str(tmp_path / "rendezvous"), hopper, peers), RANKS)


def _compare_on_gpus(rank: int, rendezvous: str, peers: bool) -> None:
    torch.cuda.set_device(rank)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    with group(rank, rendezvous, "nccl", peers=peers) as parallel:
        for sizes in (
            Sizes(200, (0,), 128, f"cuda:{rank}"),
            Sizes(75, (2, 0), 128, f"cuda:{rank}"),
        ):
            compare(parallel, sizes, hopper=hopper)


@pytest.mark.cuda
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("peers", [False, True], ids=["sent", "written"])
def test_two_gpus_round_before_the_exchange_as_behind_it(peers: bool, tmp_path: Path) -> None:
    run_ranks(_compare_on_gpus, (str(tmp_path / "rendezvous"), peers), RANKS)


def _in_graphs(rank: int, rendezvous: str) -> None:
    """Exchanges there and back as a CUDA graph, replayed with other numbers, by ranks that are
    not in step.
    """
    torch.cuda.set_device(rank)
    tokens = 301
    with group(rank, rendezvous, "nccl", peers=True) as parallel, torch.inference_mode():
        own = parallel.token_slice(tokens)
        x = torch.zeros(3, 1, tokens, HEADS, 64, dtype=torch.bfloat16, device="cuda")
        made = torch.zeros(
            2, 1, own.stop - own.start, HEADS, 64, dtype=torch.bfloat16, device="cuda"
        )

        def forward() -> None:
            for layer in range(2):
                q, k, v = tokens_to_heads(parallel, [part[:, own] for part in x], tokens)
                made[layer].copy_(heads_to_tokens(parallel, q + 2 * k + 4 * v))

        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        for number in range(20):
            generator = torch.Generator().manual_seed(number)
            x.copy_(torch.randint(0, 16, x.shape, generator=generator))
            if number % 3 == rank:
                torch.cuda._sleep(10_000_000)
            (graph.replay if number % 5 else forward)()
            wanted = (x[0] + 2 * x[1] + 4 * x[2])[:, own]
            assert torch.equal(made[0], wanted) and torch.equal(made[1], wanted)


@pytest.mark.cuda
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_graph_holds_exchanges_that_are_written(tmp_path: Path) -> None:
    run_ranks(_in_graphs, (str(tmp_path / "rendezvous"),), RANKS)


def _trade(rank: int, rendezvous: str, peers: bool) -> None:
    with group(rank, rendezvous, peers=peers) as parallel:
        generator = torch.Generator().manual_seed(0)
        for batch, tokens in ((1, 6), (2, 5), (2, 1)):
            q, k, v = torch.randn(3, batch, tokens, HEADS, 16, generator=generator)
            own, heads = parallel.token_slice(tokens), slice(2 * rank, 2 * rank + 2)
            for got, whole in zip(
                tokens_to_heads(parallel, [x[:, own] for x in (q, k, v)], tokens),
                (q, k, v),
                strict=True,
            ):
                assert torch.equal(got, whole[:, :, heads])
            assert torch.equal(heads_to_tokens(parallel, q[:, :, heads]), q[:, own])

            all_to_all = head_all_to_all(
                parallel, q[:, own], [(torch.float32, 1), (torch.bfloat16, 2)], tokens
            )
            assert type(all_to_all) is (PeerHeadAllToAll if peers else CollectiveHeadAllToAll)
            all_to_all.send(0, q[:, own])
            for to in range(RANKS):
                for kind, part in zip(all_to_all.send_buffer(1, to), (k, v), strict=True):
                    kind.copy_(part[:, own].unflatten(-2, (RANKS, -1))[:, :, to])
            wide, narrow = all_to_all.exchange()
            assert torch.equal(wide[0], q[:, :, heads])
            assert torch.equal(narrow, torch.stack((k, v))[:, :, :, heads].bfloat16())
            parallel.barrier()  # the next exchange is of the same kind


@pytest.mark.parametrize("peers", [False, True], ids=["sent", "written"])
def test_tensors_of_several_types_are_exchanged_in_one_exchange(
    peers: bool, tmp_path: Path
) -> None:
    run_ranks(_trade, (str(tmp_path / "rendezvous"), peers), RANKS)


def _write_after_write(rank: int, rendezvous: str) -> None:
    """The second rank is slow to read what a forward that only writes K/V has brought; the first
    has more to send.
    """
    with group(rank, rendezvous, peers=True) as parallel:
        windows = [make_window(HEADS // RANKS, Sizes(4), storage=None)]
        exchange = HeadExchange(parallel, 12)
        own = parallel.token_slice(12)
        for number in range(2):
            rows = [Row(windows[0], range(CHUNK * number, CHUNK * (number + 1)))]
            q, k, v = (x[:, own] for x in projected(rows, number, Sizes(4)))
            write = windows[0].write

            def slow(*args: torch.Tensor, write: Callable[..., None] = write) -> None:
                if rank == 1:
                    pause(0.1)
                write(*args)

            windows[0].write = slow  # type: ignore[method-assign, assignment]
            exchange.attend(rows, 0, q, k, v, write_only=True)
            windows[0].write = write  # type: ignore[method-assign]
            windows[0].commit(CHUNK * (number + 1))
            whole = projected(rows, number, Sizes(4))[1][0, :, 2 * rank : 2 * rank + 2]
            assert torch.equal(windows[0].visible(0, rows[0].frames)[0][-12:], whole)


def test_no_one_writes_again_before_all_have_read(tmp_path: Path) -> None:
    run_ranks(_write_after_write, (str(tmp_path / "rendezvous"),), RANKS)


def test_windows_that_do_not_round_and_first_chunks_go_the_plain_way() -> None:
    parallel = ParallelContext(0, RANKS, sequence_parallel=True)
    plain, rounding = make_window(2, Sizes(4), storage=None), make_window(2, Sizes(4))
    first, later = range(CHUNK), range(CHUNK, 2 * CHUNK)
    for rows in (
        [Row(plain, later)],
        [Row(rounding, first)],
        [Row(rounding, later), Row(rounding, first)],
    ):
        assert type(head_exchange(parallel, rows, 12)) is HeadExchange
    assert type(head_exchange(ParallelContext(), [Row(rounding, later)], 12)) is HeadExchange


@pytest.mark.parametrize("storage", [None, FP8])
def test_what_is_written_in_its_place_is_as_if_handed_over(storage: torch.dtype | None) -> None:
    """Windows keep the same numbers, and attention reads them; a chunk that turns the ring or
    makes scales has none.
    """
    sizes, exchange = Sizes(4), HeadExchange(ParallelContext(), 4 * CHUNK)
    handed, placed = (make_window(HEADS, sizes, storage) for _ in range(2))
    unplaced = []
    for start in range(0, 6 * CHUNK, CHUNK):
        rows = [Row(handed, range(start, start + CHUNK))]
        own = [Row(placed, rows[0].frames)]
        q, k, v = projected(rows, 1, sizes)
        attended = exchange.attend(rows, 1, q, k, v, write_only=False)
        positions = exchange.buffers(own, 1)
        if positions is None:
            unplaced.append(start)
            exchange.attend(own, 1, q, k, v, write_only=True)
        else:
            (position,) = positions
            for target, kind, x in zip(position.stored_2TNH, range(2), (k[0], v[0]), strict=True):
                scales = position.scales_2N
                target.copy_(x if scales is None else fp8_kernels.plain_quantize(x, scales[kind]))
        found = exchange.attend_to_written(own, 1, q)
        assert attended is not None and torch.equal(found, attended)
        assert torch.equal(placed.buffer.float(), handed.buffer.float())
    makes_scales = [] if storage is None else [0]
    assert unplaced == makes_scales + [
        start for start in range(0, 6 * CHUNK, CHUNK) if turns(handed, start)
    ]
    assert HeadExchange(ParallelContext(0, 2, sequence_parallel=True), 12).buffers(rows, 1) is None


def turns(window: KVWindow, start: int) -> bool:
    slots = [window.slot(frame) for frame in range(start, start + CHUNK)]
    return slots != list(range(slots[0], slots[0] + CHUNK))


def test_one_row_is_not_copied() -> None:
    row = torch.zeros(2)
    assert stack([row]).data_ptr() == row.data_ptr()
    assert stack([row, row]).shape == (2, 2)


# -- kernels, by Triton's interpreter --------------------------------------------------------------


def _interpreted(rank: int, rendezvous: str) -> None:
    from vllm_omni.model_executor.layers.quantization import fp8_triton

    fp8_kernels._kernels = lambda device: fp8_triton  # type: ignore[assignment]
    with group(rank, rendezvous) as parallel:
        compare(parallel, Sizes(2), hopper=False, chunks=3)
        with as_on_hopper():
            compare(parallel, Sizes(2, (1, 0)), hopper=True, chunks=2)


def test_kernels_round_into_what_is_sent(tmp_path: Path) -> None:
    """What CUDA devices do, but for the product.

    Chunks until the window is full: the interpreter takes its time.
    """
    interpret(_interpreted, str(tmp_path / "rendezvous"), size=RANKS)
