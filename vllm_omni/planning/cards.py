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
    cross_attention_tflops: few keys. elementwise_bytes_per_s, elementwise_passes: a block's elementwise chains read or
    write its activations so many times. vae_tflops: of the compiled decoder and encoder, 3x3x3 convolutions.
    video_encode_tflops: of the encoder when a video's frames arrive with each chunk, their upload in it.
    link_bytes_per_s, link_latency_s: between two GPUs. sync_s: a collective's cost besides transfer, launch
    and waiting for each other. pack_s: rearranging for Ulysses in a layer, over the tokens per rank (of 4680 x 5120
    activations on one rank).
    launch_s: the host launches one layer's kernels of one pass. collective_launch_s: and one collective between its
    ranks, with the rearranging around it. graph_launch_s: the host launches such a collective and a CUDA graph of the
    kernels around it. stage_step_s: one engine step's way through one process of several (message in, schedule, message
    out). These four are the host's: a pass takes the longer of device time and host time.
    text_encoder_cpu_s: umt5-xxl on the host, a prompt not seen before. request_s: scheduler, transport and first noise
    of a chunk. first_frame_s: the same for a session's first chunk, besides its stages. first_decode_s: of a stream's
    first decode, besides its arithmetic. memory_bytes. workspace_bytes: the largest transient, decoding a chunk at
    480x832.
    """

    name: str
    gemm_tflops: tuple[tuple[int, float], ...]
    attention_tflops: float
    cross_attention_tflops: float
    elementwise_bytes_per_s: float
    elementwise_passes: float
    vae_tflops: float
    video_encode_tflops: float
    link_bytes_per_s: float
    link_latency_s: float
    sync_s: float
    pack_s: float
    launch_s: float
    collective_launch_s: float
    graph_launch_s: float
    stage_step_s: float
    text_encoder_cpu_s: float
    request_s: float
    first_frame_s: float
    first_decode_s: float
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
    "gemm_tflops": "measured at width 5120 (760); fitted at 1536 to the steps of the 1.3B row (540)",
    "attention_tflops": "measured: 623",
    "cross_attention_tflops": "assumed: 0.35 of 790 (512 keys); 1 % of a step",
    "elementwise_bytes_per_s": "assumed: 4.0 TB/s of the card's 4.8",
    "elementwise_passes": "measured: 24 ms of a LingBot step of 343 ms",
    "vae_tflops": "measured: a chunk's decode, 147.5 ms for 40.65 TFLOP",
    "video_encode_tflops": "measured: one latent frame's video, 50.1 ms for 8.05 TFLOP",
    "link_bytes_per_s": "measured: all-to-all of 48 MB over 4 GPUs in 0.14 ms",
    "link_latency_s": "measured: ring send of 0.6 MB in 0.07 ms, less its transfer",
    "sync_s": "fitted to the steps of LingBot's two Ulysses rows",
    "pack_s": "fitted to the steps of LingBot's two Ulysses rows",
    "launch_s": "of the host; measured: 34 to 81 ms for 30 layers; in comparisons, by each run's first chunk",
    "collective_launch_s": "of the host; fitted to the rows of ranks that share layers",
    "graph_launch_s": "of the host; assumed: the 1.3B row with graphs over 4 GPUs does not wait for it",
    "stage_step_s": "of the host; fitted to the rows of several processes, 3 to 9 ms",
    "text_encoder_cpu_s": "of the host; measured: first chunks of the LingBot rows, 835 to 1480 ms",
    "request_s": "measured: chunk interval less steps and decode, 9 to 17 ms",
    "first_frame_s": "measured: time to first frame less the first chunk's stages, 25 ms, and 5 after idling",
    "first_decode_s": "measured: a first decode, 121 to 129 ms, less 114 for its 31.45 TFLOP",
    "decode_launch_s": "of the host; fitted to the first frames of the temporal rows, which ask for 0.16 and 0.23",
    "memory_bytes": "the driver's",
    "workspace_bytes": "fitted to the peaks of ranks that decode (5.3 to 10.2 GB beside weights and sessions)",
}
"""Where each number comes from; printed on the docs page."""

H200 = Card(
    name="H200",
    gemm_tflops=((1536, 540.0), (5120, 760.0)),
    attention_tflops=623.0,
    cross_attention_tflops=276.0,
    elementwise_bytes_per_s=4.0e12,
    elementwise_passes=50.0,
    vae_tflops=276.0,
    video_encode_tflops=161.0,
    link_bytes_per_s=340e9,
    link_latency_s=70e-6,
    sync_s=0.07e-3,
    pack_s=0.9e-3,
    launch_s=1.4e-3,
    collective_launch_s=0.6e-3,
    graph_launch_s=0.05e-3,
    stage_step_s=5e-3,
    text_encoder_cpu_s=1.1,
    request_s=0.010,
    first_frame_s=0.030,
    first_decode_s=0.011,
    decode_launch_s=0.17,
    memory_bytes=150.1e9,
    workspace_bytes=8.0e9,
)

CARDS = {"H200": H200}
