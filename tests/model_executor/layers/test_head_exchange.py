# SPDX-License-Identifier: Apache-2.0
"""The Ulysses all-to-all reshards activations from sequence-sharded to head-sharded and back.
Quantizing before and quantizing after the all-to-all produce bit-identical results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.fp8_product import as_on_hopper
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from helpers.shared_peers import SharedPeers
from helpers.triton_interpreter import interpret
from helpers.waits import pause

from vllm_omni.model_executor.layers import cuda_graphs
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
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import FP8
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.quantization import fp8_kernels

LAYERS, HEADS, CHUNK, RANKS = 2, 4, 3, 2
WINDOW, CHUNKS = 7, 4


@dataclass(frozen=True)
class Sizes:
    """Tensor dimensions and session lengths for a test case. `tokens` is the number of tokens per
    frame. `offsets` holds each session's lead over the newest session, in chunks.
    """

    tokens: int
    offsets: tuple[int, ...] = (0,)
    dim: int = 16
    device: str = "cpu"


@dataclass(frozen=True)
class Item:
    window: KVWindow
    frames: range


@contextmanager
def group(
    rank: int, rendezvous: str, backend: str = "gloo", *, peers: bool = False
) -> Iterator[ParallelContext]:
    """Join a process group and yield its parallel context.

    Args:
        peers: Whether ranks write into each other's memory.
    """
    with process_group(rank, RANKS, rendezvous, backend) as ranks:
        memory: PeerMemory | None = None
        if peers:
            memory = SharedPeers(rendezvous) if backend == "gloo" else PeerMemory(ranks)
        yield ParallelContext(rank, RANKS, ranks, sequence_parallel=True, peers=memory)


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
    items: list[Item], layer: int, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of all tokens and heads. Shape of each: [B, T, N, H].

    Head n's keys are 30^n times as large as head 0's, and the values are a slice of a wider tensor.
    """
    per_item = []
    for number, item in enumerate(items):
        generator = torch.Generator().manual_seed(1000 * number + 10 * item.frames.start + layer)
        per_item.append(
            torch.randn(sizes.tokens * CHUNK, HEADS, 3 * sizes.dim, generator=generator)
        )
    q, k, v = torch.stack(per_item).to(sizes.device).chunk(3, dim=-1)
    factors = 30.0 ** (torch.arange(HEADS, device=sizes.device)[:, None] - 1)
    wider = torch.cat((v, v), dim=2).bfloat16()
    return (q / factors).bfloat16(), (k * factors).bfloat16(), wider[:, :, HEADS:]


def play(
    parallel: ParallelContext, sizes: Sizes, *, ahead: bool, chunks: int = CHUNKS
) -> tuple[list[torch.Tensor], list[KVWindow], list[type[HeadExchange]]]:
    """Run `chunks` chunks of attention in every session, after the chunks of the session's lead.

    Args:
        ahead: Whether K/V may be quantized before the all-to-all.

    Returns:
        The attention results for this rank's tokens, the windows, and the exchange class used in
        each forward pass.
    """
    windows = [make_window(HEADS // parallel.size, sizes) for _ in sizes.offsets]
    results, kinds = [], []

    def chunk(items: list[Item]) -> None:
        num_tokens = sizes.tokens * CHUNK
        exchange = (
            head_exchange(parallel, items, num_tokens)
            if ahead
            else HeadExchange(parallel, num_tokens)
        )
        kinds.append(type(exchange))
        own = parallel.token_slice(num_tokens)
        for layer in range(LAYERS):
            q, k, v = (x[:, own] for x in projected(items, layer, sizes))
            attended = exchange.attend(items, layer, q, k, v, write_only=False)
            assert attended is not None and attended.shape == q.shape
            results.append(attended.clone())  # the next call may overwrite `attended`
        q, k, v = (x[:, own] for x in projected(items, 0, sizes))
        assert exchange.attend(items, 0, q, k, v, write_only=True) is None

    for window, offset in zip(windows, sizes.offsets, strict=True):
        for number in range(offset):
            chunk([Item(window, range(CHUNK * number, CHUNK * (number + 1)))])
    for number in range(chunks):
        starts = [CHUNK * (number + offset) for offset in sizes.offsets]
        chunk(
            [Item(window, range(s, s + CHUNK)) for window, s in zip(windows, starts, strict=True)]
        )
    return results, windows, kinds


class AtOnce(cuda_graphs._Recording):
    """Simulate a graph capture in which graphs share buffers, but operations between graphs run
    immediately.
    """

    def break_for(self, run: Callable[[], object]) -> None:
        run()


@contextmanager
def in_a_capture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "_recording", AtOnce(None, {}))
        yield


def compare(parallel: ParallelContext, sizes: Sizes, *, hopper: bool, chunks: int = CHUNKS) -> None:
    """Check that quantizing before and after the all-to-all produces bit-identical results, with
    and without a graph capture, and that both equal the results of one rank.

    Args:
        hopper: Whether attention uses FP8 matrix products.
    """
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
    # On other devices, kernels may sum in a different order if the number of heads changes.
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
def test_quantizing_before_the_exchange_equals_quantizing_after_it(
    hopper: bool, peers: bool, tmp_path: Path
) -> None:
    """Two ranks produce the same results as one rank, bit for bit, with and without a graph
    capture. The test cases include a single session, an odd number of tokens, and a batch of
    sessions at different chunks.
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
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("peers", [False, True], ids=["sent", "written"])
def test_two_gpus_give_the_same_bits_in_both_orders(peers: bool, tmp_path: Path) -> None:
    run_ranks(_compare_on_gpus, (str(tmp_path / "rendezvous"), peers), RANKS)


def _in_graphs(rank: int, rendezvous: str) -> None:
    """Replay a CUDA graph that contains exchanges in both directions. Each replay has new values,
    and one rank is delayed.
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
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_graph_contains_exchanges_through_peer_memory(tmp_path: Path) -> None:
    run_ranks(_in_graphs, (str(tmp_path / "rendezvous"),), RANKS)


def _all_to_all(rank: int, rendezvous: str, peers: bool) -> None:
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
            parallel.barrier()  # the next exchange uses the same buffers


@pytest.mark.parametrize("peers", [False, True], ids=["sent", "written"])
def test_tensors_of_several_dtypes_share_one_exchange(peers: bool, tmp_path: Path) -> None:
    run_ranks(_all_to_all, (str(tmp_path / "rendezvous"), peers), RANKS)


def _write_after_write(rank: int, rendezvous: str) -> None:
    """After a K/V-only forward pass, delay the second rank's read while the first rank is already
    sending again.
    """
    with group(rank, rendezvous, peers=True) as parallel:
        windows = [make_window(HEADS // RANKS, Sizes(4), storage=None)]
        exchange = HeadExchange(parallel, 12)
        own = parallel.token_slice(12)
        for number in range(2):
            items = [Item(windows[0], range(CHUNK * number, CHUNK * (number + 1)))]
            q, k, v = (x[:, own] for x in projected(items, number, Sizes(4)))
            write = windows[0].write

            def slow(*args: torch.Tensor, write: Callable[..., None] = write) -> None:
                if rank == 1:
                    pause(0.1)
                write(*args)

            windows[0].write = slow  # type: ignore[method-assign, assignment]
            exchange.attend(items, 0, q, k, v, write_only=True)
            windows[0].write = write  # type: ignore[method-assign]
            windows[0].commit(CHUNK * (number + 1))
            whole = projected(items, number, Sizes(4))[1][0, :, 2 * rank : 2 * rank + 2]
            assert torch.equal(windows[0].visible(0, items[0].frames)[0][-12:], whole)


def test_no_rank_writes_again_before_all_have_read(tmp_path: Path) -> None:
    run_ranks(_write_after_write, (str(tmp_path / "rendezvous"),), RANKS)


def test_plain_windows_and_first_chunks_use_the_plain_exchange() -> None:
    parallel = ParallelContext(0, RANKS, sequence_parallel=True)
    plain, rounding = make_window(2, Sizes(4), storage=None), make_window(2, Sizes(4))
    first, later = range(CHUNK), range(CHUNK, 2 * CHUNK)
    for items in (
        [Item(plain, later)],
        [Item(rounding, first)],
        [Item(rounding, later), Item(rounding, first)],
    ):
        assert type(head_exchange(parallel, items, 12)) is HeadExchange
    assert type(head_exchange(ParallelContext(), [Item(rounding, later)], 12)) is HeadExchange


@pytest.mark.parametrize("storage", [None, FP8])
def test_writing_into_the_window_equals_passing_keys_and_values(
    storage: torch.dtype | None,
) -> None:
    """Writing keys and values directly into the window produces the same window content and
    attention output as passing them as tensors. For a chunk that wraps around the ring buffer or
    sets the scales, the window offers no buffers for direct writes.
    """
    sizes, exchange = Sizes(4), HeadExchange(ParallelContext(), 4 * CHUNK)
    passed, written = (make_window(HEADS, sizes, storage) for _ in range(2))
    without_buffers = []
    for start in range(0, 6 * CHUNK, CHUNK):
        items = [Item(passed, range(start, start + CHUNK))]
        own = [Item(written, items[0].frames)]
        q, k, v = projected(items, 1, sizes)
        attended = exchange.attend(items, 1, q, k, v, write_only=False)
        buffers = exchange.buffers(own, 1)
        if buffers is None:
            without_buffers.append(start)
            exchange.attend(own, 1, q, k, v, write_only=True)
        else:
            (buffer,) = buffers
            for target, kind, x in zip(buffer.stored_2TNH, range(2), (k[0], v[0]), strict=True):
                scales = buffer.scales_2N
                target.copy_(x if scales is None else fp8_kernels.plain_quantize(x, scales[kind]))
        found = exchange.attend_to_written(own, 1, q)
        assert attended is not None and torch.equal(found, attended)
        assert torch.equal(written.buffer.float(), passed.buffer.float())
    makes_scales = [] if storage is None else [0]
    assert without_buffers == makes_scales + [
        start for start in range(0, 6 * CHUNK, CHUNK) if turns(passed, start)
    ]
    assert HeadExchange(ParallelContext(0, 2, sequence_parallel=True), 12).buffers(items, 1) is None


def turns(window: KVWindow, start: int) -> bool:
    slots = [window.slot(frame) for frame in range(start, start + CHUNK)]
    return slots != list(range(slots[0], slots[0] + CHUNK))


# -- kernels run by Triton's interpreter -----------------------------------------------------------


def _interpreted(rank: int, rendezvous: str) -> None:
    from vllm_omni.model_executor.layers.quantization import fp8_triton

    fp8_kernels._kernels = lambda device: fp8_triton  # type: ignore[assignment]
    with group(rank, rendezvous) as parallel:
        compare(parallel, Sizes(2), hopper=False, chunks=3)
        with as_on_hopper():
            compare(parallel, Sizes(2, (1, 0)), hopper=True, chunks=2)


def test_interpreted_kernels_quantize_into_the_send_buffer(tmp_path: Path) -> None:
    """Triton's interpreter runs the same kernels as CUDA devices, except for the matrix product.

    Because the interpreter is slow, the test ends when the window is full.
    """
    interpret(_interpreted, str(tmp_path / "rendezvous"), size=RANKS)
