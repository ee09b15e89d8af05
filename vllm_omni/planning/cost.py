# SPDX-License-Identifier: Apache-2.0
"""FLOPs, bytes and milliseconds of a streaming Wan-family model, from its shapes. Pure functions; nothing is loaded.

A chunk of F latent frames is S denoise passes over a window of W frames, and with the strict cache a clean pass more.
2 FLOP per multiply-add. q = F n query tokens, k = W n key tokens, n = tokens of a latent frame, d width, f FFN width, L
layers:

    linear  2 q (6 d^2 + 2 d f) L        self-attention  4 q k d L        cross-attention  4 q 512 d L

A prompt's K/V are kept, a camera's modulation is computed once a chunk (8 q d^2 L). Layers beside the trunk's (action
modules) are `side` of `StreamModel`.

Two things bound a pass, and the slower one decides: the device's arithmetic, and the host, which launches kernels and
collectives layer by layer and takes part in each engine step. Small models over several GPUs are bound by the host.
CUDA graphs take the launching away. Held by tests/planning/.
"""

from dataclasses import dataclass, replace

from vllm_omni.planning.cards import Card
from vllm_omni.planning.stream_model import BF16, Split, StreamModel

_DECODE_EXCHANGES = 34
"""Of one latent frame, if ranks decode together: rows before each of 33 convolutions, and the attention's K/V."""
_INT8 = 1


@dataclass(frozen=True)
class Prediction:
    """Milliseconds and bytes. chunk_ms: between two chunks of one session while `sessions` run; per_chunk_ms: of the
    server. host_bound: whether a pass waits for the host. memory_bytes: of the fullest rank. max_sessions:
    that fit.
    """

    split: Split
    sessions: int
    steps_ms: float
    decode_ms: float
    chunk_ms: float
    per_chunk_ms: float
    first_frame_ms: float
    session_bytes: float
    memory_bytes: float
    max_sessions: int
    fps: float
    host_bound: bool

    @property
    def fits(self) -> bool:
        return self.max_sessions >= self.sessions


def linear_tflop(model: StreamModel, query_frames: int) -> float:
    q = query_frames * model.tokens_per_frame
    passed = model.linears or (6 * model.dim**2 + 2 * model.dim * model.ffn_dim) * model.layers
    return q * (2 * passed + model.side_flop) / 1e12


def attention_tflop(model: StreamModel, query_frames: int, window: int) -> float:
    n = model.tokens_per_frame
    return 4 * query_frames * n * window * n * model.dim * model.layers / 1e12


def cross_tflop(model: StreamModel, query_frames: int) -> float:
    return 4 * query_frames * model.tokens_per_frame * model.context_rows * model.dim * model.layers / 1e12


def pass_ms(model: StreamModel, card: Card, window: int) -> float:
    """One pass on one GPU, over a chunk or over as many frames as the window has."""
    frames = min(model.chunk, window)
    q = frames * model.tokens_per_frame
    copied = 2 * window_bytes(model, window) if model.in_flight > 1 else 0.0  # the window, before it is attended to
    elementwise_s = copied / card.elementwise_bytes_per_s
    elementwise_s += model.layers * card.elementwise_passes * q * model.dim * BF16 / card.elementwise_bytes_per_s
    compute_s = (
        linear_tflop(model, frames) / card.gemm(model.dim)
        + (attention_tflop(model, frames, window) + cross_tflop(model, frames)) / card.attention_tflops
    )
    return 1e3 * (compute_s + elementwise_s)


def camera_ms(model: StreamModel, card: Card) -> float:
    """A chunk's camera modulation on one GPU: four square layers a block."""
    flop = 8 * model.chunk * model.tokens_per_frame * model.dim**2 * model.layers
    return 1e3 * flop / 1e12 / card.gemm(model.dim) if model.camera else 0.0


def exchange_ms(model: StreamModel, card: Card, split: Split) -> float:
    """Time that `split.ranks` ranks add to one pass: all-to-alls (Ulysses) or all-reduces (TP), waiting."""
    u = split.ranks
    if u == 1:
        return 0.0
    q = model.chunk * model.tokens_per_frame
    numbers = q * model.dim
    if split.tensor:  # three all-reduces a block, each twice over the link, and two of normalisation sums
        transfer_s = 3 * 2 * numbers * BF16 * (u - 1) / u / card.link_bytes_per_s
    else:  # q, k, v to heads, the result back, as they are kept; each rank has 1/u of the tokens
        transfer_s = 4 * numbers * model.kv_itemsize / u * (u - 1) / u / card.link_bytes_per_s
    return 1e3 * model.layers * (transfer_s + _collectives(split) * card.sync_s)


def _rank_pass_ms(model: StreamModel, card: Card, split: Split, window: int) -> float:
    """One pass where `split.ranks` ranks share its tokens, but each has as many kernels as one would."""
    gaps_ms = 1e3 * model.layers * card.layer_gaps_s
    return pass_ms(model, card, window) / split.ranks + exchange_ms(model, card, split) + gaps_ms


def _collectives(split: Split) -> int:
    """Of a layer."""
    return 0 if split.ranks == 1 else 5 if split.tensor else 2


def launch_ms(model: StreamModel, card: Card, split: Split, *, graphs: bool = False) -> float:
    """The host of one stage with layers launches one pass; graphs: as CUDA graphs, with collectives between."""
    collectives = _collectives(split)
    launch_s = collectives * card.graph_launch_s if graphs else card.launch_s + collectives * card.collective_launch_s
    return 1e3 * model.layers / split.layer_parts * launch_s


def host_ms(model: StreamModel, card: Card, split: Split, *, graphs: bool = False) -> float:
    """All that the host of one stage with layers does for one pass."""
    return launch_ms(model, card, split, graphs=graphs) + (1e3 * card.stage_step_s if split.gpus > 1 else 0.0)


def pass_latency_ms(model: StreamModel, card: Card, split: Split, window: int) -> tuple[float, float]:
    """One pass of one chunk through all stages when nothing else runs: (the device's time, the host's)."""
    device = _rank_pass_ms(model, card, split, window)
    if split.stages > 1:
        device += (1 if split.temporal else split.stages) * hop_ms(model, card, split)
    host = split.layer_parts * host_ms(model, card, split, graphs=model.cuda_graphs)
    return device, host + (1e3 * card.stage_step_s if split.vae_stage else 0.0)


def setup_ms(model: StreamModel, card: Card) -> float:
    """Work of a session's first chunk before its steps."""
    setup = 1e3 * card.text_encoder_cpu_s if model.text_on_cpu else 0.0
    if model.image:  # the start picture through the VAE's encoder, with the chunk's grey frames behind it
        setup += 1e3 * model.autoencoder.encode_tflop * (1 + model.first_chunk) * model.area / card.vae_tflops
    return setup


def encode_ms(model: StreamModel, card: Card, frames: int, *, first: bool = False) -> float:
    """The video frames of a chunk of `frames` latent frames through the VAE's encoder; 0 without video input."""
    if not model.video_input:
        return 0.0
    pixel_frames = 4 * frames - 3 * first
    return 1e3 * model.autoencoder.encode_tflop * pixel_frames / 4 * model.area / card.video_encode_tflops


def until_result_ms(model: StreamModel, card: Card, split: Split, sessions: int = 1) -> float:
    """From a first chunk's last pass before its decode to its frames, when its session's next chunk is asked for.

    On one GPU that is the decode. On several a result leaves with a step that ends after it: half a step later on
    average, behind those of other chunks in flight if a VAE stage sees them pass; the clean pass of ranks that also
    decode takes as long as it does. In a temporal pipeline that step begins when the decode is launched, and is the
    next chunk's way through all stages, of which all but the last make the first chunk's K/V anew before. Sessions
    that begin together in stages, set-ups apart, reach the decode together: the first one's next step comes behind the
    others' decodes.
    """
    decode = decode_ms(model, card, split, first=True)
    if split.gpus == 1:
        return decode
    step = max(pass_latency_ms(model, card, split, model.first_chunk))
    if split.temporal:
        launch = 0.0 if split.vae_stage else 1e3 * card.decode_launch_s
        return max(decode + step / 2, launch + (2 * split.layer_stages - 1) * step)
    if split.stages == 1:
        return decode + step
    behind = 0.5 + (model.in_flight - 1 if split.vae_stage else 0)
    return decode + (sessions - 1) * max(0.0, decode - setup_ms(model, card)) + behind * step


def hop_ms(model: StreamModel, card: Card, split: Split) -> float:
    """Hidden states (fp32 residual) from one stage to the next."""
    size = 2 * BF16 * model.chunk * model.tokens_per_frame * model.dim / split.ranks
    return 1e3 * (card.link_latency_s + size / card.link_bytes_per_s)


def chunk_steps_ms(model: StreamModel, card: Card, split: Split, window: int) -> float:
    """The device's time for all passes of one chunk, as if one stage ran all blocks."""
    one = _rank_pass_ms(model, card, split, window)
    return model.passes * one + camera_ms(model, card) / split.ranks


def window_bytes(model: StreamModel, frames: int) -> float:
    """K/V of so many latent frames, all layers and heads."""
    numbers = 2 * (model.kv_dim or model.dim) * model.layers + model.side_kv
    return float(model.kv_itemsize * frames * model.tokens_per_frame * numbers)


def decode_ms(model: StreamModel, card: Card, split: Split, *, first: bool = False) -> float:
    """A chunk's decode, on each rank that takes part."""
    frames = model.first_chunk if first else model.chunk
    cost = model.autoencoder
    tflop = cost.decode_tflop * (frames - first) + cost.decode_first_tflop * first
    exchanges = frames * _DECODE_EXCHANGES if split.decode_ranks > 1 else 0
    return 1e3 * (tflop * model.area / card.vae_tflops / split.decode_ranks + exchanges * card.link_latency_s)


def cross_kv_bytes(model: StreamModel, split: Split) -> float:
    """Each chunk in flight may bring a prompt of its own."""
    one = (
        2
        * model.context_rows
        * model.dim
        * BF16
        * model.layers
        / split.layer_parts
        / (split.ranks if split.tensor else 1)
    )
    return model.in_flight * one


def session_bytes(model: StreamModel, split: Split, *, last_stage: bool = True) -> float:
    """On the first rank of a stage with layers; that of the last decodes, without a VAE stage."""
    frames = model.window + (model.sinks if model.moving_sinks else 0) + (model.in_flight - 1) * model.chunk
    windows = 1 if model.clean or split.temporal else model.denoise
    window = windows * window_bytes(model, frames) / (split.ranks * split.layer_parts)
    decodes = last_stage and not split.vae_stage
    decoder = model.autoencoder.decoder_cache / split.decode_ranks if decodes else 0.0
    caches = (decoder + (model.autoencoder.encoder_cache if model.image or model.video_input else 0)) * model.area
    return window + cross_kv_bytes(model, split) + caches


def weight_bytes(model: StreamModel, split: Split, *, first_stage: bool = True) -> float:
    """On the first rank of a stage with layers: that of the first has the text encoder."""
    shared = split.layer_parts * (split.ranks if split.tensor else 1)
    adapters = adapter_bytes(model, split)
    saved = model.block_parameters * (BF16 - model.weight_itemsize)
    if model.weight_itemsize < BF16:
        saved += model.camera_parameters * (BF16 - _INT8)
    held = first_stage or model.context_everywhere
    context = model.context_weights if held and not model.text_on_cpu else 0
    return (model.parameters * BF16 - saved) / shared + adapters + model.autoencoder.weights + context


@dataclass(frozen=True)
class _Rank:
    """Bytes: fixed, without a session; each, of one session."""

    fixed: float
    each: float


def _fullest(model: StreamModel, card: Card, split: Split) -> list[_Rank]:
    """The ranks that can be the fullest: the first of the first stage and of the last, and that of a VAE stage."""
    at_once = 1 if split.stages == 1 else 2  # decodes: of the next chunk, while results wait for a step
    workspace = at_once * model.autoencoder.workspace * card.workspace_bytes * model.area / split.decode_ranks
    found = []
    for first, last in ((True, True),) if split.layer_stages == 1 else ((True, False), (False, True)):
        fixed = weight_bytes(model, split, first_stage=first) + (workspace if last and not split.vae_stage else 0.0)
        found.append(_Rank(fixed, session_bytes(model, split, last_stage=last)))
    if split.vae_stage:  # the decoder, its caches, and its decodes
        caches = model.autoencoder.decoder_cache * model.area / split.decode_ranks
        found.append(_Rank(model.autoencoder.weights + workspace, caches))
    return found


def adapter_bytes(model: StreamModel, split: Split) -> float:
    """Slots of LoRA adapters, taken at start. Tensor parallel ranks share one of a difference's two factors."""
    whole = model.adapters * model.adapter_rank * model.sides * BF16 / split.layer_parts
    return whole * (1 + 1 / split.ranks) / 2 if split.tensor else whole


def predict(model: StreamModel, card: Card, split: Split, sessions: int = 1) -> Prediction:
    """Rates, times and memory of `sessions` live sessions.

    A strict session's passes follow one another, so stages only help when several sessions fill them: the server then
    ends a chunk every max(busiest stage, one session's own latency / sessions). Chunks in flight fill them as sessions
    do. A stage is as busy as its device or its host, whichever has more to do for a chunk.
    """
    if split.replicas > 1:
        one = predict(model, card, replace(split, replicas=1), -(-sessions // split.replicas))
        return replace(
            one,
            split=split,
            sessions=sessions,
            per_chunk_ms=one.per_chunk_ms / split.replicas,
            max_sessions=one.max_sessions * split.replicas,
            fps=one.fps * split.replicas,
        )
    decode_launch = 1e3 * card.decode_launch_s * model.autoencoder.launch
    steps, decode = chunk_steps_ms(model, card, split, model.window), decode_ms(model, card, split)
    request = 1e3 * card.request_s + encode_ms(model, card, model.chunk)
    decode_beside = 0.0 if split.vae_stage else decode
    camera = camera_ms(model, card) / split.ranks
    one_pass = pass_latency_ms(model, card, split, model.window)
    # A decode runs beside the next chunk's passes and delays them as much as they need its device: on one GPU, wholly.
    all_passes = model.passes * max(one_pass) + camera
    latency = all_passes + request + decode_beside * min(1.0, steps / split.layer_stages / all_passes)
    passes_of_a_stage = model.passes / split.layer_stages if split.temporal else model.passes
    host = passes_of_a_stage * host_ms(model, card, split, graphs=model.cuda_graphs)
    if split.vae_stage:  # whose own host sees each step pass
        host = max(host, model.passes * 1e3 * card.stage_step_s + decode_launch)
    else:
        host += decode_launch
    host += request
    device = max(steps / split.layer_stages + decode_beside + request, decode)
    per_chunk = max(device, host, latency / (sessions * model.in_flight))
    # Sessions that begin together are set up one after the other, before the first of their steps, and share stages.
    # Chunks in flight behind the first take their turns between its passes, where a stage has several.
    passes = model.denoise + model.image_passes + (model.in_flight - 1) / split.layer_stages
    first_steps = passes * max(pass_latency_ms(model, card, split, model.first_chunk))
    first_steps += launch_ms(model, card, split) if model.growing_graphs else 0.0
    setup = setup_ms(model, card) + encode_ms(model, card, model.first_chunk, first=True) + 1e3 * card.request_s
    shared = max(1.0, sessions / split.layer_stages)
    first = sessions * setup + shared * (first_steps + camera + until_result_ms(model, card, split, sessions))
    first += 1e3 * card.first_frame_s
    ranks = _fullest(model, card, split)
    most = min((0.95 * card.memory_bytes - rank.fixed) // rank.each for rank in ranks)
    return Prediction(
        split=split,
        sessions=sessions,
        steps_ms=steps,
        decode_ms=decode,
        chunk_ms=per_chunk * sessions,
        per_chunk_ms=per_chunk,
        first_frame_ms=first,
        session_bytes=max(rank.each for rank in ranks),
        memory_bytes=max(rank.fixed + sessions * rank.each for rank in ranks),
        max_sessions=max(0, int(most)),
        fps=1e3 * model.frames_per_chunk / per_chunk,
        host_bound=one_pass[1] > one_pass[0],
    )


def splits(model: StreamModel, gpus: int, sessions: int = 1) -> list[Split]:
    """Every split over at most `gpus` GPUs that heads, layers and cache allow; ranks of one stage decode together.

    Replicas have as many of the sessions each.
    """
    found = [Split()]
    for ranks in range(1, gpus + 1):
        if model.heads % ranks:
            continue
        for stages in range(1, gpus // ranks + 1):
            if ranks * stages == 1 or stages > model.layers:
                continue
            tensors = (False,) if ranks == 1 else (False, True) if model.sequence_parallel else (True,)
            together = ranks > 1 and model.sequence_parallel
            for vae_stage in (False, True) if stages > 1 else (False,):
                found += [Split(ranks, stages, tensor, vae_stage, vae_parallel=together) for tensor in tensors]
                if not model.clean and 1 < stages - vae_stage == model.denoise:
                    found += [replace(split, temporal=True) for split in found[-len(tensors) :]]
    replicas = [count for count in range(2, sessions + 1) if sessions % count == 0]
    copies = [replace(split, replicas=count) for split in found for count in replicas]
    return found + [split for split in copies if split.gpus <= gpus]
