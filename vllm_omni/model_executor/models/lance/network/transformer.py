# SPDX-License-Identifier: Apache-2.0
"""`Qwen2MoTForCausalLM`, a Qwen2.5-VL decoder with two experts, and the latent projections.

The `und` expert processes text, vision tokens and block markers, and the `gen` expert processes
latent tokens. Tokens of the two experts attend to each other. A `TokenPack` (`pack.py`) describes
the tokens of one forward pass. The parameter names match the checkpoint
(`layers.N.self_attn.q_proj[_moe_gen].weight`, ...). Each rank loads only its own heads and columns.
Maths: bytedance/Lance, modeling/lance. This module is tested against the golden files and by
tests/model_executor/models/lance/test_lance_transformer.py.
"""

# T tokens, D width, N query heads, K key/value heads, H head dim, F feed-forward width; _r: this
# rank's part

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.offloader import get_offloader

from vllm_omni.model_executor.layers.attention.attention import attention
from vllm_omni.model_executor.layers.collectives.parallel import (
    CheckpointSlot,
    ParallelContext,
    ShardedModule,
)
from vllm_omni.model_executor.layers.kv_cache.memory_pool import MemoryPool
from vllm_omni.model_executor.layers.linear.linear import (
    LinearPrecision,
    MergedLinear,
    QKVLinear,
    RowLinear,
)
from vllm_omni.model_executor.layers.linear.quantized_input import (
    Input,
    split_tokens,
    takes_quantized,
)
from vllm_omni.model_executor.models.lance.config import (
    LATENT_CHANNELS,
    TIMESTEP_FREQUENCIES,
    LanceConfig,
)
from vllm_omni.model_executor.models.lance.network.expert_streams import ExpertStreams
from vllm_omni.model_executor.models.lance.network.fused_ops import FusedOps
from vllm_omni.model_executor.models.lance.network.pack import BranchCache, Expert, TokenPack
from vllm_omni.model_executor.models.lance.network.token_split import (
    HeadShare,
    Rope,
    TokenSplit,
    head_share,
)

_SUFFIX: dict[Expert, str] = {"und": "", "gen": "_moe_gen"}
_MLP_TOKENS = 32768
"""Maximum number of tokens per call of a feed-forward layer. The limit bounds the memory for the
layer's activations, which would otherwise be two thirds of a forward pass's peak memory.
"""


class ExpertLayer(ShardedModule):
    """One expert's weights in one layer. Heads and columns are sharded across tensor-parallel
    ranks.
    """

    def __init__(
        self,
        config: LanceConfig,
        expert: Expert,
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.name, self.suffix = expert, _SUFFIX[expert]
        share = split_heads(config, parallel)
        self.num_heads, self.num_kv_heads = share.heads, share.kv_heads
        width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.q_size = self.num_heads * head_dim
        self.qkv = QKVLinear(
            width,
            head_dim,
            config.num_heads,
            config.num_kv_heads,
            parallel,
            quant_config,
            f"{prefix}.qkv",
        )
        self.q_norm, self.k_norm = _empty(head_dim), _empty(head_dim)
        heads_width = config.num_heads * head_dim
        self.out = RowLinear(
            heads_width, width, parallel, quant_config, f"{prefix}.out", bias=False
        )
        halves = ("gate_proj", "up_proj")
        self.gate_up = MergedLinear(
            width, halves, (inner, inner), parallel, quant_config, f"{prefix}.gate_up", bias=False
        )
        self.down = RowLinear(inner, width, parallel, quant_config, f"{prefix}.down", bias=False)
        self.input_norm, self.post_norm = _empty(width), _empty(width)

    def linears(self, prefix: str) -> list[tuple[LinearBase, list[str]]]:
        """Return the linear layers, each with the checkpoint names of its matrices."""
        layer, end = prefix.rpartition(".")[0], self.suffix
        return [
            (self.qkv, [f"{layer}.self_attn.{name}_proj{end}" for name in "qkv"]),
            (self.out, [f"{layer}.self_attn.o_proj{end}"]),
            (self.gate_up, [f"{layer}.mlp{end}.{name}" for name in self.gate_up.names]),
            (self.down, [f"{layer}.mlp{end}.down_proj"]),
        ]

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        layer, end = prefix.rpartition(".")[0], self.suffix
        (_, qkv), (_, out), (_, gate_up), (_, down) = self.linears(prefix)
        yield from self.qkv.named_slots(qkv)
        yield from self.out.slots(*out)
        yield from self.gate_up.named_slots(gate_up)
        yield from self.down.slots(*down)
        for name, norm in (
            (f"self_attn.q_norm{end}", self.q_norm),
            (f"self_attn.k_norm{end}", self.k_norm),
            (f"input_layernorm{end}", self.input_norm),
            (f"post_attention_layernorm{end}", self.post_norm),
        ):
            yield f"{layer}.{name}.weight", CheckpointSlot(tuple(norm.shape), norm.data)


class MoTLayer(nn.Module):
    def __init__(
        self,
        config: LanceConfig,
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.und = ExpertLayer(config, "und", parallel, quant_config, f"{prefix}.und")
        self.gen = ExpertLayer(config, "gen", parallel, quant_config, f"{prefix}.gen")

    def expert(self, name: Expert) -> ExpertLayer:
        return self.und if name == "und" else self.gen


class NormWeight(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = _empty(dim)


class LinearWeight(nn.Module):
    """A linear layer with a weight [rows, columns] and an optional bias."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(rows, columns)
        self.bias = _empty(rows) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Qwen2MoTModel(nn.Module):
    def __init__(
        self,
        config: LanceConfig,
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.embed_tokens = LinearWeight(config.vocab_size, config.hidden_size)
        made = (
            MoTLayer(config, parallel, quant_config, f"{prefix}.layers.{index}")
            for index in range(config.num_layers)
        )
        self.layers = nn.ModuleList(get_offloader().wrap_modules(made))
        self.norm = NormWeight(config.hidden_size)
        self.norm_moe_gen = NormWeight(config.hidden_size)


class Qwen2MoTForCausalLM(nn.Module):
    """The decoder. `forward` processes one `TokenPack`. Separate methods compute text logits and
    embeddings.
    """

    def __init__(
        self,
        config: LanceConfig,
        parallel: ParallelContext | None = None,
        compiled: bool = False,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel or ParallelContext()
        self.model = Qwen2MoTModel(
            config, self.parallel, LinearPrecision(quantization), "language_model.model"
        )
        self.lm_head = LinearWeight(config.vocab_size, config.hidden_size)
        self._split = TokenSplit(config, self.parallel)
        self._fused_ops: dict[Expert, FusedOps] = {
            "und": FusedOps.build(False),
            "gen": FusedOps.build(compiled),
        }

    @property
    def num_cache_heads(self) -> int:
        """Return the number of key/value heads in this rank's caches."""
        if self._split.active:
            return self._split.num_cache_heads
        first = self.model.layers[0]
        assert isinstance(first, MoTLayer)
        return first.und.num_kv_heads

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def new_cache(self, capacity: int, block: int = 0) -> BranchCache:
        """Return an empty cache for this rank's heads, with `capacity` slots for a context and
        `block` slots for a generated block.
        """
        shape = self._cache_shape(block + capacity)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return BranchCache(k, v, block=block)

    def take_cache(self, pool: MemoryPool[BranchCache], capacity: int, block: int) -> BranchCache:
        """Return a cache of this size from the pool, or a new one (`new_cache`) if the pool has
        none.
        """
        sizes = self._cache_shape(block + capacity), self.dtype, self.device, block
        return pool.take_memory(sizes, lambda: self.new_cache(capacity, block))

    def _cache_shape(self, slots: int) -> torch.Size:
        return torch.Size(
            (self.config.num_layers, slots, self.num_cache_heads, self.config.head_dim)
        )

    def cache_nbytes(self, slots: int) -> int:
        """Return the size in bytes of a cache that has `slots` slots."""
        row = self.config.num_layers * self.num_cache_heads * self.config.head_dim
        return 2 * row * slots * self.dtype.itemsize

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids_T, self.model.embed_tokens.weight)

    def logits(self, hidden_TD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the fp32 logits [T, num_tokens] for the final hidden states of the `und` expert.
        Output weight rows beyond `num_tokens` are not used, because they do not correspond to
        tokens.
        """
        return functional.linear(hidden_TD, self.lm_head.weight[:num_tokens]).float()

    def forward(self, pack: TokenPack) -> dict[Expert, torch.Tensor]:
        """Run all layers and return each expert's hidden states after the final norm, [T, D].

        With several ranks, this is a collective operation.
        """
        x = self.hidden_states(pack)
        norms = {"und": self.model.norm, "gen": self.model.norm_moe_gen}
        eps = self.config.rms_norm_eps
        return {
            name: self._split.join(
                name,
                self._fused_ops[name].rms_norm(rows, norms[name].weight, eps),
                pack.embeds[name].shape[0],
            )
            for name, rows in x.items()
        }

    def hidden_states(
        self, pack: TokenPack, layers: int | None = None
    ) -> dict[Expert, torch.Tensor]:
        """Run the first `layers` layers (default: all), and return the residual stream for each
        expert's tokens.
        """
        x, rope = self._split.own(pack)
        updates: dict[Expert, torch.Tensor] = {}
        streams = ExpertStreams(x)
        for index, layer in enumerate(self.model.layers[:layers]):
            assert isinstance(layer, MoTLayer)
            self._layer(index, layer, x, updates, rope, pack, streams)
        streams.join()
        return {name: rows + updates[name] if name in updates else rows for name, rows in x.items()}

    def _layer(
        self,
        index: int,
        layer: MoTLayer,
        x: dict[Expert, torch.Tensor],
        updates: dict[Expert, torch.Tensor],
        ropes: Mapping[Expert, Rope],
        pack: TokenPack,
        streams: ExpertStreams,
    ) -> None:
        """Run one layer and replace the entries in `x`.

        `updates` contains each expert's pending update, which has not been added to `x` yet.
        """
        queries: dict[Expert, torch.Tensor] = {}
        for name in x:
            with streams.of(name):
                queries[name] = self._store(index, layer.expert(name), x, updates, ropes, pack)
        streams.join()
        for name in x:
            with streams.of(name):
                self._attend(index, layer.expert(name), queries.pop(name), x, updates, pack)

    def _store(
        self,
        index: int,
        expert: ExpertLayer,
        x: dict[Expert, torch.Tensor],
        updates: Mapping[Expert, torch.Tensor],
        ropes: Mapping[Expert, Rope],
        pack: TokenPack,
    ) -> torch.Tensor:
        """Write the keys and values of one expert's tokens to the caches, and return the queries
        [T, N_r, H].
        """
        name, eps = expert.name, self.config.rms_norm_eps
        fused_ops = self._fused_ops[name]
        quantized = takes_quantized(expert.qkv)
        if name in updates:
            x[name], normed = fused_ops.add_norm(
                x[name], updates[name], expert.input_norm, eps, quantized
            )
        else:
            normed = fused_ops.rms_norm(x[name], expert.input_norm, eps, quantized)
        qkv, (cos, sin), n = expert.qkv(normed), ropes[name], expert.num_heads
        heads = qkv.unflatten(-1, (-1, self.config.head_dim))
        q = fused_ops.norm_rope(heads[:, :n], expert.q_norm, cos, sin, eps)
        stores = [store for store in pack.stores if store.expert == name]
        if self._split.active:
            k, v = heads[:, n:].chunk(2, dim=1)
            k = fused_ops.norm_rope(k, expert.k_norm, cos, sin, eps)
            q, k, v = self._split.to_heads(name, q, k, v, pack.embeds[name].shape[0])
            for store in stores:
                store.cache.k[index, store.slots] = k[store.tokens]
                store.cache.v[index, store.slots] = v[store.tokens]
            return q
        for store in stores:
            fused_ops.store_key_value(
                qkv[store.tokens, expert.q_size :],
                cos[store.tokens],
                sin[store.tokens],
                expert.k_norm,
                store.cache.k[index, store.slots],
                store.cache.v[index, store.slots],
                eps,
            )
        return q

    def _attend(
        self,
        index: int,
        expert: ExpertLayer,
        queries: torch.Tensor,
        x: dict[Expert, torch.Tensor],
        updates: dict[Expert, torch.Tensor],
        pack: TokenPack,
    ) -> None:
        """Run attention and the feed-forward layer for one expert's tokens. The keys and values of
        all tokens must have been written.
        """
        name, mixed = expert.name, torch.empty_like(queries)
        fused_ops = self._fused_ops[name]
        for job in pack.attends:
            if job.expert == name:
                cache = job.cache
                slots = (
                    slice(None) if job.keys is None else slice(cache.block, cache.block + job.keys)
                )
                attention(
                    queries[job.tokens],
                    cache.k[index, slots],
                    cache.v[index, slots],
                    causal=job.causal,
                    key_range=pack.seen[cache] if job.keys is None else None,
                    out=mixed[job.tokens],
                )
        update = expert.out(self._split.to_tokens(name, mixed).flatten(-2))
        x[name], normed = fused_ops.add_norm(
            x[name],
            update,
            expert.post_norm,
            self.config.rms_norm_eps,
            takes_quantized(expert.gate_up),
        )
        updates[name] = self._mlp(expert, fused_ops, normed)

    def _mlp(self, expert: ExpertLayer, fused_ops: FusedOps, x_TD: Input) -> torch.Tensor:
        quantized = takes_quantized(expert.down)
        parts = [
            expert.down.own_part(fused_ops.silu_mul(expert.gate_up(part), quantized))
            for part in split_tokens(x_TD, _MLP_TOKENS)
        ]
        return self.parallel.all_reduce(parts[0] if len(parts) == 1 else torch.cat(parts))


class TimeEmbedder(nn.Module):
    """Embeds a timestep in [0, 1]: computes cosines and sines at 128 frequencies, then applies two
    linear layers (`mlp.0`, `mlp.2`).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = (
            LinearWeight(width, TIMESTEP_FREQUENCIES, bias=True),
            LinearWeight(width, width, bias=True),
        )
        self.mlp = nn.ModuleDict({"0": first, "2": second})

    def forward(self, timesteps_S: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [S, width] of fp32 timesteps [S], in the weights' dtype."""
        first = self.mlp["0"]
        assert isinstance(first, LinearWeight)
        features = timestep_features(timesteps_S).to(first.weight.dtype)
        out: torch.Tensor = self.mlp["2"](functional.silu(first(features)))
        return out


def timestep_features(timesteps_S: torch.Tensor) -> torch.Tensor:
    """Return the features [cos(t f) | sin(t f)] of timesteps, fp32 [S, 256], for f =
    10000^(-k/128). The timestep t is not scaled.
    """
    half = TIMESTEP_FREQUENCIES // 2
    lanes = torch.arange(half, dtype=torch.float32, device=timesteps_S.device)
    angles = timesteps_S.float()[:, None] * torch.exp(-math.log(10000.0) * lanes / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class LancePositionEmbedding3D(nn.Module):
    """The fixed 3-D sine table of latent positions. It has one entry for each (frame, row, column)
    of a frames x size x size grid.

    A third of the channels encode the frame, a third encode the row (both counts are rounded to an
    even number), and the remaining channels encode the column. Each part is [sin | cos] with
    frequencies 10000^(-k / half), computed in fp64. If `stored` is true, the checkpoint's table
    (`pos_embed`) is used instead of computed entries. Even for one frame, the table differs from
    the 2-D table of the model's predecessor.
    """

    def __init__(self, width: int, frames: int, size: int, stored: bool = False) -> None:
        super().__init__()
        self.width, self.frames, self.size = width, frames, size
        self.pos_embed = _empty(frames * size * size, width) if stored else None

    def rows(
        self,
        frames: int,
        height: int,
        width: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return a latent grid's position embeddings in token order, [frames * height * width,
        D].
        """
        if frames > self.frames or max(height, width) > self.size:
            raise ValueError(
                f"a latent grid of {frames}x{height}x{width} is outside the table of {self.frames} "
                f"frames of {self.size}x{self.size}"
            )
        if self.pos_embed is not None:
            return self.pos_embed[
                self.flat_ids(frames, height, width).to(self.pos_embed.device)
            ].to(device, dtype)
        third = 2 * (self.width // 6)
        sizes = ((third, frames), (third, height), (self.width - 2 * third, width))
        parts = [sine_table(dim, length).to(device, dtype) for dim, length in sizes]
        grid = torch.empty(frames, height, width, self.width, device=device, dtype=dtype)
        grid[..., :third] = parts[0][:, None, None]
        grid[..., third : 2 * third] = parts[1][None, :, None]
        grid[..., 2 * third :] = parts[2][None, None, :]
        return grid.flatten(0, 2)

    def flat_ids(self, frames: int, height: int, width: int) -> torch.Tensor:
        """Return the index of each grid cell in the stored table, int64."""
        t, h, w = torch.arange(frames), torch.arange(height), torch.arange(width)
        return (((t * self.size)[:, None] + h)[:, :, None] * self.size + w).flatten()


def sine_table(dim: int, length: int) -> torch.Tensor:
    """Return the sine table [length, dim] for one axis, fp32. Its rows are [sin | cos] of position
    * 10000^(-k / (dim / 2)), computed in fp64.
    """
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim / 2))
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


class LanceNetwork(nn.Module):
    """The network in a Lance `model.safetensors`, without the vision tower. The parameter names
    match the checkpoint.
    """

    def __init__(
        self,
        config: LanceConfig,
        parallel: ParallelContext | None = None,
        *,
        stored_positions: bool = False,
        compiled: bool = False,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.language_model = Qwen2MoTForCausalLM(config, parallel, compiled, quantization)
        self.time_embedder = TimeEmbedder(width)
        self.vae2llm = LinearWeight(width, LATENT_CHANNELS, bias=True)
        self.llm2vae = LinearWeight(LATENT_CHANNELS, width, bias=True)
        self.latent_pos_embed = LancePositionEmbedding3D(
            width, config.max_latent_frames, config.max_latent_size, stored_positions
        )

    def embed_latents(
        self, x_TC: torch.Tensor, time_TD: torch.Tensor, positions_TD: torch.Tensor
    ) -> torch.Tensor:
        """Return the embeddings [T, D] of latent tokens. `time_TD` may have one row for all
        tokens.
        """
        return self.vae2llm(x_TC.to(self.vae2llm.weight.dtype)) + time_TD + positions_TD

    def velocity(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the fp32 velocity [T, 48] for the final hidden states of the `gen` expert."""
        return self.llm2vae(hidden_TD).float()


def split_heads(config: LanceConfig, parallel: ParallelContext) -> HeadShare:
    """Return this rank's heads under tensor parallelism.

    Raises:
        ValueError: The heads cannot be divided evenly across the ranks.
    """
    size = parallel.tensor_size
    share = head_share(config, size, parallel.tensor_rank)
    if share is None or config.intermediate_size % size:
        raise ValueError(
            f"{config.num_heads} heads, {config.num_kv_heads} key/value heads and "
            f"{config.intermediate_size} columns "
            f"do not divide over {size} ranks; use a --tensor-parallel-size that divides "
            f"{config.num_heads} and "
            f"{config.intermediate_size}"
        )
    return share


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
