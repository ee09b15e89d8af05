# SPDX-License-Identifier: Apache-2.0
"""`CudaPages`: device memory that is mapped into a reserved address range on demand.

`CudaPages` uses the driver's virtual memory management through NVIDIA's `cuda.bindings` package, a
dependency of torch's CUDA builds. vLLM's `cumem_allocator` (sleep mode) makes the same calls, but
maps a whole range at once. torch's expandable segments can only grow at their end, whereas a K/V
window grows in each of its rows.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


def _driver() -> Any:
    from cuda.bindings import driver  # only in CUDA builds

    return driver


def _call(result: tuple[Any, ...]) -> Any:
    """Return a driver call's value.

    Raises:
        torch.OutOfMemoryError: The device does not have enough memory.
        RuntimeError: The call failed for any other reason.
    """
    driver, (error, *values) = _driver(), result
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("the device has no memory for a longer K/V window")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver failed on the memory of a K/V window: {error.name}")
    return values[0] if values else None


def _properties(device: torch.device) -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = _index(device)
    return properties


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def cuda_page_bytes(device: torch.device) -> int:
    """Return the size in bytes of the smallest unit of memory that the driver maps: 2 MiB on
    current GPUs.
    """
    torch.cuda.init()
    driver = _driver()
    kind = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(driver.cuMemGetAllocationGranularity(_properties(device), kind)))


class CudaPages:
    """A reserved address range on a CUDA device. New pages are uninitialised.

    Args:
        nbytes: Length of the range, a multiple of the page size.
        device: CUDA device that holds the memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device, self._nbytes = device, nbytes
        self._page = cuda_page_bytes(device)
        self._mapped: list[range] = []
        torch.cuda.current_stream(device).synchronize()  # creates this thread's CUDA context
        self._start = int(_call(_driver().cuMemAddressReserve(nbytes, 0, 0, 0)))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the range to torch. The tensor that torch creates keeps this object alive."""
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._start, False),
            "version": 2,
        }

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device)

    def allocate(self, runs: Sequence[range]) -> None:
        done: list[range] = []
        try:
            for run in runs:
                self._map(run)
                done.append(run)
        except torch.OutOfMemoryError:
            self._unmap(done)
            raise
        self._mapped += done

    def free(self, runs: Sequence[range]) -> None:
        torch.cuda.synchronize(self._device)  # kernels may still read the window
        self._unmap(self._mapped)
        self._mapped = []

    def _map(self, run: range) -> None:
        driver, nbytes = _driver(), len(run) * self._page
        address = self._start + run.start * self._page
        properties = _properties(self._device)
        try:
            handle = _call(driver.cuMemCreate(nbytes, properties, 0))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch may hold free memory
            handle = _call(driver.cuMemCreate(nbytes, properties, 0))
        try:
            _call(driver.cuMemMap(address, nbytes, 0, handle, 0))
        finally:  # from here on, the mapping keeps the memory alive
            _call(driver.cuMemRelease(handle))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(driver.cuMemSetAccess(address, nbytes, [access], 1))

    def _unmap(self, runs: Sequence[range]) -> None:
        for run in runs:
            address = self._start + run.start * self._page
            _call(_driver().cuMemUnmap(address, len(run) * self._page))

    def __del__(self) -> None:
        if hasattr(self, "_start") and not sys.is_finalizing():
            self.free([])
            _call(_driver().cuMemAddressFree(self._start, self._nbytes))
