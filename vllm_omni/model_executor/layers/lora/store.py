# SPDX-License-Identifier: Apache-2.0
"""`AdapterStore`: one rank's registered adapters, and their copies in host memory and in device
slots.

An adapter is registered when a user adds it through vLLM (`--lora-modules`,
`/v1/load_lora_adapter`) and it passes validation. Host memory holds at most `--max-cpu-loras`
adapters; any other registered adapter is read from disk again when a request uses it. Device slots
hold at most `--max-loras` adapters, which limits the number of adapters that can be active in one
forward pass. Host memory and device slots both evict the least recently used adapter.
"""

import itertools
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from vllm.config.lora import LoRAConfig
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from vllm_omni.inputs import Lora, UsedLora
from vllm_omni.model_executor.layers.lora.active import ActiveAdapter, using
from vllm_omni.model_executor.layers.lora.adapter import AdapterWeights, TargetNames, load_adapter
from vllm_omni.model_executor.layers.lora.sites import AdaptedLayers
from vllm_omni.model_executor.layers.lora.target import AdapterTarget, SupportsAdapters
from vllm_omni.outputs import RequestFailed

logger = init_logger("vllm." + __name__)


_LISTED_KINDS: Final = 20


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """The weights of one adapter. Each distinct set of weights is a separate object."""

    name: str
    """Name under which requests refer to the adapter."""
    version: int
    """Version number that identifies the weights."""
    weights: AdapterWeights
    """The weights in host memory."""


@dataclass(frozen=True)
class UsedAdapter:
    """A LoRA adapter together with the strength at which one chunk applies it. Two `UsedAdapter`
    objects are equal if their names, weights and strengths are equal.
    """

    name: str
    """Name under which requests refer to the adapter."""
    scale: float
    """Strength at which the chunk uses the adapter."""
    version: int
    """Version number of the weights; see `StoredAdapter.version`."""
    adapter: StoredAdapter = field(compare=False, repr=False)
    """The adapter that the chunk uses, with its weights."""


Selection = tuple[UsedAdapter, ...]
"""The adapters that a chunk uses, in the order in which the request names them. Empty: the chunk
uses no adapters.
"""


def named(selection: Selection) -> list[UsedLora]:
    """Return a selection in the request format, with the digest of each adapter's weights."""
    return [
        UsedLora(name=used.name, scale=used.scale, digest=used.adapter.weights.digest)
        for used in selection
    ]


def _described(saved: Sequence[UsedLora]) -> str:
    return ", ".join(
        f"adapter {one.name!r} (scale {one.scale:g}, weights {one.digest})" for one in saved
    )


def _skipped_line(names: Sequence[str]) -> str:
    """Return one line that lists skipped tensors. Modules whose names differ only in the block
    index are grouped.
    """
    kinds = Counter(re.sub(r"(?<=[._])\d+(?=[._])", "N", name) for name in names)
    listed = ", ".join(
        f"{ascii(kind)[1:-1]} ({count})" for kind, count in kinds.most_common(_LISTED_KINDS)
    )
    listed += f" and {len(kinds) - _LISTED_KINDS} kinds more" if len(kinds) > _LISTED_KINDS else ""
    return f"{len(names)} tensors do not fit this model and are skipped: {listed}"


class NoAdapters:
    """Adapter store for a server without `--enable-lora`."""

    nbytes = 0

    def select(self, wanted: Sequence[Lora]) -> Selection:
        if wanted:
            raise RequestFailed(
                "invalid_request",
                f"lora: there is no adapter {wanted[0].name!r}: this server runs without "
                "--enable-lora",
            )
        return ()

    def select_saved(self, saved: Sequence[UsedLora]) -> Selection:
        """Return the adapters that a saved session needs when it is resumed.

        Raises:
            RequestFailed: `foreign_snapshot` if this server lacks one of the adapters.
        """
        if saved:
            raise RequestFailed(
                "foreign_snapshot",
                f"the session uses {_described(saved)}, and this server runs without --enable-lora",
            )
        return ()

    def select_request(self, request: LoRARequest) -> Selection:
        """Return the adapter that vLLM's own LoRA argument names, at strength 1. Register the
        adapter if it is not registered yet.
        """
        try:
            self.add_adapter(request)
        except ValueError as error:
            logger.error("%s", error)
            raise RequestFailed(
                "invalid_request",
                f"lora: adapter {request.lora_name!r} cannot be loaded; the server's log says why",
            ) from error
        return self.select([Lora(name=request.lora_name)])

    @contextmanager
    def applied(self, selection: Selection) -> Iterator[None]:
        yield

    @contextmanager
    def detached(self) -> Iterator[None]:
        yield

    def ids(self) -> set[int]:
        return set()

    def add_adapter(self, request: LoRARequest) -> bool:
        raise ValueError(f"adapter {request.lora_name!r}: this engine runs without --enable-lora")

    def remove(self, number: int) -> bool:
        return False


class AdapterStore(NoAdapters):
    """Adapter store for a server with `--enable-lora`.

    Args:
        targets: The model's networks, keyed by name.
        config: vLLM's LoRA options.
        device: Device that holds the networks.
    """

    def __init__(
        self, targets: Mapping[str, AdapterTarget], config: LoRAConfig, device: torch.device
    ) -> None:
        assert isinstance(config.lora_dtype, torch.dtype) and config.max_cpu_loras is not None
        self._targets = dict(targets)
        self._slots, self._max_cached = config.max_loras, config.max_cpu_loras
        self._max_rank, self._dtype = config.max_lora_rank, config.lora_dtype
        self._scales = torch.ones(config.max_loras, dtype=torch.float32, device=device)
        self._layers = {
            name: AdaptedLayers(
                target, config.max_loras, config.max_lora_rank, config.lora_dtype, self._scales
            )
            for name, target in targets.items()
        }
        self._own = TargetNames(
            frozenset(
                (name, module)
                for name, layers in self._layers.items()
                for module in layers.matrices
            ),
            frozenset(
                (name, tensor)
                for name, layers in self._layers.items()
                for tensor in layers.vectors.names
            ),
        )
        self._known: dict[str, LoRARequest] = {}
        self._digests: dict[str, str] = {}
        """Digests of the registered adapters, computed at registration. When an adapter is read
        again, its weights must have the same digest.
        """
        self._loaded: OrderedDict[str, StoredAdapter] = OrderedDict()
        self._in_slots: OrderedDict[int, int] = OrderedDict()
        """Slot of each adapter that is on the device, keyed by the adapter's version. The least
        recently used adapter comes first.
        """
        self._layouts: dict[Hashable, int] = {}
        self._shown_scales = [1.0] * config.max_loras
        self._numbers = itertools.count(1)
        for layers in self._layers.values():
            layers.attach_adapters()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of the device memory for all slots. This memory is allocated at
        startup.
        """
        return sum(layers.nbytes for layers in self._layers.values())

    # -- called by vLLM ----------------------------------------------------------------------------

    def ids(self) -> set[int]:
        return {request.lora_int_id for request in self._known.values()}

    def add_adapter(self, request: LoRARequest) -> bool:
        """Validate and register an adapter. Return False if the adapter is already registered.

        Raises:
            ValueError: The adapter cannot be used. The message is one line.
        """
        name = request.lora_name
        before = self._known.get(name)
        if before is not None and not request.load_inplace:
            if before.lora_path != request.lora_path:
                raise ValueError(
                    f"adapter {name!r} is there, from another place; unload it first or "
                    "load_inplace"
                )
            return False
        adapter = self._read(request)
        if skipped := adapter.weights.skipped:
            logger.warning_once("adapter %r: %s", name, _skipped_line(skipped))
        self._known[name] = request
        self._digests[name] = adapter.weights.digest
        self._keep(adapter)
        return True

    def remove(self, number: int) -> bool:
        """Unregister an adapter. Later requests that name it are rejected."""
        name = next(
            (name for name, request in self._known.items() if request.lora_int_id == number), None
        )
        if name is None:
            return False
        del self._known[name], self._digests[name]
        self._loaded.pop(name, None)
        return True

    def _read(self, request: LoRARequest) -> StoredAdapter:
        try:
            weights = load_adapter(
                request.lora_path, self._targets, self._max_rank, self._dtype, self._own
            )
        except (ValueError, OSError) as error:
            raise ValueError(f"adapter {request.lora_name!r}: {error}") from error
        return StoredAdapter(request.lora_name, next(self._numbers), weights)

    def _keep(self, adapter: StoredAdapter) -> None:
        self._loaded[adapter.name] = adapter
        self._loaded.move_to_end(adapter.name)
        while len(self._loaded) > self._max_cached:
            self._loaded.popitem(last=False)

    # -- called for requests -----------------------------------------------------------------------

    def select(self, wanted: Sequence[Lora]) -> Selection:
        """Return the adapters that a request names.

        Raises:
            RequestFailed: `invalid_request` if the adapters cannot be used.
        """
        names = [one.name for one in wanted]
        if len(set(names)) < len(names):
            raise RequestFailed("invalid_request", f"lora: adapters must differ, got {names[:3]}")
        for name in names:
            if name not in self._known:
                known = ", ".join(list(self._known)[:3]) or "none is loaded"
                raise RequestFailed(
                    "invalid_request", f"lora: there is no adapter {name!r}; there are: {known}"
                )
        acting = [one for one in wanted if one.scale]
        if len(acting) > self._slots:
            raise RequestFailed(
                "invalid_request",
                f"lora: {len(acting)} adapters at once; this server takes --max-loras "
                f"{self._slots}",
            )
        return tuple(self._used(one) for one in acting)

    def select_saved(self, saved: Sequence[UsedLora]) -> Selection:
        if missing := [one for one in saved if one.name not in self._known]:
            raise RequestFailed(
                "foreign_snapshot",
                f"the session uses {_described(missing)}, not loaded here: load it (--lora-modules "
                "NAME=PATH) and "
                "restore again",
            )
        selection = self.select(saved)
        here = {one.name: one.digest for one in named(selection)}
        if others := [one for one in saved if one.digest != here.get(one.name)]:
            raise RequestFailed(
                "foreign_snapshot",
                f"the session uses {_described(others)}, and the weights of that name here are "
                f"{', '.join(here[one.name] for one in others)}: load those it was made with",
            )
        return selection

    def _used(self, one: Lora) -> UsedAdapter:
        adapter = self._loaded.get(one.name)
        if adapter is None:
            try:
                adapter = self._read(self._known[one.name])
                if adapter.weights.digest != self._digests[one.name]:
                    raise ValueError(
                        f"adapter {one.name!r}: {self._known[one.name].lora_path} holds other "
                        "weights than when it was "
                        "loaded; load it again with load_inplace"
                    )
            except ValueError as error:
                logger.error("%s", error)
                raise RequestFailed(
                    "invalid_request",
                    f"lora: adapter {one.name!r} cannot be read any more; the server's log "
                    "says why",
                ) from error
        self._keep(adapter)
        return UsedAdapter(one.name, one.scale, adapter.version, adapter)

    @contextmanager
    def applied(self, selection: Selection) -> Iterator[None]:
        """Activate exactly these adapters for the forward passes inside the `with` block."""
        active = [self._load_into(used, selection) for used in selection]
        for layers in self._layers.values():
            layers.vectors.show(active)
        with using(active):
            yield

    def _load_into(self, used: UsedAdapter, selection: Selection) -> ActiveAdapter:
        """Copy an adapter into a slot if it is not already in one, and set its strength."""
        slot, weights = self._in_slots.get(used.version), used.adapter.weights
        if slot is None:
            slot = self._free_slot({other.version for other in selection})
            for name, layers in self._layers.items():
                layers.fill(slot, name, weights)
            self._in_slots[used.version] = slot
        self._in_slots.move_to_end(used.version)
        if self._shown_scales[slot] != used.scale:
            self._scales[slot].fill_(used.scale)
            self._shown_scales[slot] = used.scale
        layout = self._layouts.setdefault(weights.layout, len(self._layouts))
        return ActiveAdapter(slot, layout, used.version, used.scale)

    def _free_slot(self, needed: set[int]) -> int:
        free = next(
            (slot for slot in range(self._slots) if slot not in self._in_slots.values()), None
        )
        if free is not None:
            return free
        oldest = next(version for version in self._in_slots if version not in needed)
        return self._in_slots.pop(oldest)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Restore the original networks, so their weights can be reloaded inside the `with` block.
        Afterwards, each adapter is copied into a slot again when it is next used.
        """
        for layers in self._layers.values():
            layers.detach()
        self._in_slots.clear()
        try:
            yield
        finally:
            for layers in self._layers.values():
                layers.attach_adapters()


def store_for(network: nn.Module, config: LoRAConfig | None, device: torch.device) -> NoAdapters:
    """Return an `AdapterStore` if `--enable-lora` is set, otherwise `NoAdapters`.

    Raises:
        ValueError: `--enable-lora` is set, but the network does not support adapters.
    """
    if config is None:
        return NoAdapters()
    if not isinstance(network, SupportsAdapters):
        raise ValueError(f"--enable-lora: {type(network).__name__} takes no adapters; drop it")
    return AdapterStore(network.adapter_targets(), config, device)
