# SPDX-License-Identifier: Apache-2.0
"""Measured and fitted rates of one kind of GPU and of its host, each with its source.

Knows no model. Held by tests/planning/test_split_plan.py.
"""

import bisect
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Card:
    """Rates of a card; bf16 unless said otherwise.

    gemm_tflops: (width of a layer, TFLOP/s) pairs, interpolated. attention_tflops: FlashAttention 3, head size 128.
    elementwise_bytes_per_s, elementwise_passes: a block's elementwise chains read or write its activations so many
    times. layer_gaps_s: of a layer's pass the device is between kernels, or at ones too short for the rates above.
    vae_tflops: of the fused decoder and the encoder, whose 3x3x3 convolutions count as if multiplied out.
    video_encode_tflops: of the encoder when a video's frames arrive with each chunk, their upload in it.
    link_bytes_per_s, link_latency_s: between two GPUs. sync_s: a collective's cost besides transfer and launch, between
    GPUs that write into each other's memory.
    launch_s: the host launches one layer's kernels of one pass. collective_launch_s: and one collective between its
    ranks, with the rearranging around it. graph_launch_s: the host launches such a collective and a CUDA graph of the
    kernels around it. stage_step_s: one engine step's way through one process of several (message in, schedule, message
    out). These four are the host's: a pass takes the longer of device time and host time.
    text_encoder_cpu_s: umt5-xxl on the host, a prompt not seen before. request_s: scheduler, transport and first noise
    of a chunk. first_frame_s: the same for a session's first chunk, besides its stages. decode_launch_s: the host
    launches a chunk's decode. memory_bytes. workspace_bytes: the largest transient, decoding a chunk at 480x832.
    """

    name: str
    gemm_tflops: tuple[tuple[int, float], ...]
    attention_tflops: float
    elementwise_bytes_per_s: float
    elementwise_passes: float
    layer_gaps_s: float
    vae_tflops: float
    video_encode_tflops: float
    link_bytes_per_s: float
    link_latency_s: float
    sync_s: float
    launch_s: float
    collective_launch_s: float
    graph_launch_s: float
    stage_step_s: float
    text_encoder_cpu_s: float
    request_s: float
    first_frame_s: float
    decode_launch_s: float
    memory_bytes: float
    workspace_bytes: float

    def beside_host(self, factor: float) -> "Card":
        """The same card beside a host that takes `factor` times as long to launch kernels."""
        return replace(self, launch_s=factor * self.launch_s, collective_launch_s=factor * self.collective_launch_s)

    def gemm(self, width: int) -> float:
        """TFLOP/s of matrix products of layers `width` wide; constant outside the measured widths."""
        widths = [known for known, _ in self.gemm_tflops]
        place = bisect.bisect_left(widths, width)
        if place == 0 or place == len(widths):
            return self.gemm_tflops[min(place, len(widths) - 1)][1]
        (low, below), (high, above) = self.gemm_tflops[place - 1], self.gemm_tflops[place]
        return below + (above - below) * (width - low) / (high - low)


SOURCES = {
    "gemm_tflops": "measured at width 5120: 758 to 777; at 1536 fitted to the steps of the 1.3B rows",
    "attention_tflops": "measured, with cross-attention: 594 (1.3B), 631 and 652 (LingBot World), 664 (its 1.3B)",
    "elementwise_bytes_per_s": "assumed: 4.0 TB/s of the card's 4.8; H100: by the ratio of one kernel's times",
    "elementwise_passes": "measured: 13 ms of a LingBot step of 334 ms, 3 of a 1.3B step of 43 ms",
    "layer_gaps_s": "measured: steps less their kernels, 0.05 (Waypoint) to 0.09 ms (1.3B)",
    "vae_tflops": "measured: a chunk's decode, 59 ms (H100: 64) for 40.65 TFLOP, half of them left out by Winograd",
    "video_encode_tflops": "measured: one latent frame's video, 50.1 ms for 8.05 TFLOP",
    "link_bytes_per_s": "fitted to the steps of the 1.3B over 2 and 4 GPUs: 63 us of a layer are exchanges",
    "link_latency_s": "measured: ring send of 0.6 MB in 0.07 ms, less its transfer",
    "sync_s": "measured: ranks meet in 5 us",
    "launch_s": "of the host; measured without graphs: 34 to 81 ms for 30 layers",
    "collective_launch_s": "of the host; fitted to rows of ranks that shared layers without graphs",
    "graph_launch_s": "of the host; assumed: the 1.3B row over 4 GPUs does not wait for it",
    "stage_step_s": "of the host; fitted to the rows of several processes, 3 to 9 ms",
    "text_encoder_cpu_s": "of the host; measured: first chunks of the LingBot rows, 835 to 1480 ms",
    "request_s": "measured: chunk interval less steps and decode, 1 to 3 ms",
    "first_frame_s": "measured: time to first frame less the first chunk's total, 11 to 14 ms",
    "decode_launch_s": "of the host; assumed: CUDA graphs, and the copy of the frames",
    "memory_bytes": "the driver's",
    "workspace_bytes": "measured: peak less the bytes held after it, 3.9 to 4.5 GB on one GPU",
}
"""Where each number comes from; printed on the docs page."""

H200 = Card(
    name="H200",
    gemm_tflops=((1536, 610.0), (5120, 770.0)),
    attention_tflops=640.0,
    elementwise_bytes_per_s=4.0e12,
    elementwise_passes=27.0,
    layer_gaps_s=0.06e-3,
    vae_tflops=690.0,
    video_encode_tflops=161.0,
    link_bytes_per_s=220e9,
    link_latency_s=70e-6,
    sync_s=0.005e-3,
    launch_s=1.4e-3,
    collective_launch_s=0.6e-3,
    graph_launch_s=0.05e-3,
    stage_step_s=5e-3,
    text_encoder_cpu_s=1.1,
    request_s=0.002,
    first_frame_s=0.01,
    decode_launch_s=0.005,
    memory_bytes=150.1e9,
    workspace_bytes=4.0e9,
)

H100 = replace(H200, name="H100", elementwise_bytes_per_s=3.2e12, vae_tflops=640.0, memory_bytes=85.0e9)

CARDS = {card.name: card for card in (H200, H100)}
