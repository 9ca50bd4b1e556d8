"""The memory that the judge lends: one slab, mapped by every process that is to see it.

A slab holds a few slots, a slot the tensors of one input set with guard bytes around each. Nothing
else of the judge's lies in a slab, so nothing else can be reached through it.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.problem import dtype_name, torch_dtype
from fastkernels_tuner.measure.protocol import Buffer, CudaBuffer, FileBuffer, Lent

ALIGNMENT = 512
GUARD_BYTES = 512


def lay_out(tensors: Sequence[tuple[str, torch.Tensor, bool]]) -> tuple[tuple[Lent, ...], int]:
    """Where (name, tensor, is_output) go in a slot, strides kept, and the slot's size."""
    lent: list[Lent] = []
    end = 0
    for name, tensor, is_output in tensors:
        offset = _up(end + GUARD_BYTES)
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        lent.append(
            Lent(
                name=name,
                is_output=is_output,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                offset=offset,
                nbytes=nbytes,
            )
        )
        end = offset + nbytes
    return tuple(lent), _up(end + GUARD_BYTES)


def view(slot: torch.Tensor, lent: Lent) -> torch.Tensor:
    """The tensor in a slot, which is a tensor of bytes."""
    flat = slot[lent.offset : lent.offset + lent.nbytes].view(torch_dtype(lent.dtype))
    return flat.as_strided(lent.shape, lent.stride)


def is_dense(lent: Lent) -> bool:
    """Whether every byte from first to last belongs to an element."""
    return lent.nbytes == math.prod(lent.shape) * torch_dtype(lent.dtype).itemsize


def _up(size: int) -> int:
    return size + -size % ALIGNMENT


# ---- slabs --------------------------------------------------------------------------------------


class FileSlab:
    """On a CPU: a file in memory, or in the temporary folder where that is too small."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.path = _reserve(nbytes)
        self.bytes = _map(str(self.path), nbytes)

    def share(self) -> FileBuffer:
        return FileBuffer(path=str(self.path), nbytes=self.nbytes)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


class CudaSlab:
    """On a GPU: an allocation in a pool of its own, since what a process maps is the whole segment
    around it. A process that was killed never gives its reference back, and the segment stays."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def share(self) -> CudaBuffer:
        storage: Any = self.bytes.untyped_storage()
        _, handle, nbytes, offset, counter, counter_offset, event, is_synchronised = (
            storage._share_cuda_()
        )
        return CudaBuffer(
            handle=handle,
            nbytes=nbytes,
            offset=offset,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            is_synchronised=is_synchronised,
        )

    def close(self) -> None:
        del self.bytes
        torch.cuda.ipc_collect()


def attach(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """The bytes of another process's slab."""
    if isinstance(buffer, FileBuffer):
        return _map(buffer.path, buffer.nbytes)
    storage_class: Any = torch.UntypedStorage
    torch.cuda.init()
    storage = storage_class._new_shared_cuda(
        device.index,
        buffer.handle,
        buffer.nbytes,
        buffer.offset,
        buffer.counter,
        buffer.counter_offset,
        buffer.event,
        buffer.is_synchronised,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _map(path: str, nbytes: int) -> torch.Tensor:
    storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _reserve(nbytes: int) -> Path:
    """A new file with room for so many bytes. Raises OSError where there is none."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for folder in folders:
        if not os.access(folder, os.W_OK):
            continue
        handle, name = tempfile.mkstemp(prefix="fastkernels-lent-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, nbytes)  # else the first write beyond ends the process
        except OSError as error:
            os.unlink(name)
            if error.errno != errno.ENOSPC:
                raise
        else:
            return Path(name)
        finally:
            os.close(handle)
    raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes in {' or '.join(map(str, folders))}")
