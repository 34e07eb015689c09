"""Buffers of leaves (inputs, states, weights), kept as long as a graph has the leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from ..backends import Device, Operand, Pack
from ..backends.alignment import aligned
from ..errors import GraphError, GraphllmError, OutOfMemory
from ..graph.dtype import BF16, DType
from ..graph.tensor import Meta, Tensor, live, replica
from ..weights import Arrays, Weights
from .devices import Devices

GUARD_VALUE = 0xA5  # of guard bytes around a buffer


@dataclass
class _Value:
    """The buffer of an input or a state in one memory, at the upper bound of its shape."""

    operand: Operand
    parts: dict[int, Operand] = field(default_factory=dict)  # the leading rows, by their number

    def leading(self, rows: int) -> Operand:
        """Return the first rows, at most all; the same object for the same number."""
        if rows not in self.parts:
            most = self.operand.meta.bound()
            shape = (min(rows, live(most.rows, {})), *most.inner) if most.shape else ()
            self.parts[rows] = replace(self.operand, meta=replace(most, shape=shape))
        return self.parts[rows]


class Buffers:
    """Buffers of the leaves of an executor's graphs.

    All graphs of an executor share one node per leaf name, see `leaf`. Buffers are held under this
    node by weak reference: they are freed with the last graph or plan that has the leaf.

    Args:
        devices: devices of the executor.
        weights: source of the bytes of weights.
        guard_bytes: guard bytes before and behind each input and state; filled with `GUARD_VALUE`.
    """

    def __init__(self, devices: Devices, weights: Weights, guard_bytes: int = 0) -> None:
        self._devices, self._source, self._guard_bytes = devices, weights, guard_bytes
        self._leaves: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._values: WeakKeyDictionary[Tensor, dict[str, _Value]] = WeakKeyDictionary()
        self._weights: WeakKeyDictionary[Tensor, dict[tuple[Pack | None, str], Any]]
        self._weights = WeakKeyDictionary()  # by pack function and memory
        self._unwritten = set[str]()  # leaves with a buffer that the host has not written
        self._lock = Lock()
        self.packed = 0  # number of weights prepared

    def leaf(self, node: Tensor) -> Tensor:
        """Return the node shared by all leaves of this name. GraphError if their Metas differ."""
        known = self._leaves.get(node.name)
        if known is None:
            known = self._leaves[node.name] = replica(node)
        if known.meta != node.meta:
            raise GraphError(f"leaf {node.name!r} is {node.meta}, elsewhere {known.meta}")
        return known

    # -- inputs and states
    def operand(self, name: str, memory: str) -> Operand:
        """Return the buffer of an input or a state in ``memory``, initially zeros."""
        leaf = self._leaves[name]
        values = self._values.setdefault(leaf, {})
        if memory not in values:
            device, nbytes = self._devices.owner(memory), leaf.meta.bound().nbytes
            guard = self._guard_bytes
            size = aligned(nbytes) + 2 * guard if guard else max(nbytes, 1)
            buffer = allocate(device, size, name)
            if guard:
                buffer[:guard] = GUARD_VALUE
                buffer[guard + nbytes :] = GUARD_VALUE
            values[memory] = _Value(Operand(replace(leaf.meta, offset=guard), buffer))
            self._unwritten.add(name)
        return values[memory].operand

    def write(self, data: Mapping[str, Any]) -> None:
        """Write the leading rows of states and inputs; see `Executor.set_state`."""
        for call in self.writers(data):
            call()

    def writers(self, data: Mapping[str, Any]) -> list[Callable[[], None]]:
        """Return the calls of a `write`, to be repeated: they write what the arrays then hold."""
        found = dict[str, list[tuple[Operand, np.ndarray]]]()  # by memory
        for name, given in data.items():
            values, meta = self._values_of(name), self._leaves[name].meta
            array = converted(f"{name!r}", given, meta.dtype)
            for memory, value in values.items():
                operand = value.leading(len(array) if array.ndim else 1)
                if not fits(array, operand.meta):
                    raise GraphError(
                        f"{name!r} is {meta}; data of shape {array.shape} does not fit"
                    )
                found.setdefault(memory, []).append((operand, array))
        calls = [self._devices.owner(memory).writer(parts) for memory, parts in found.items()]
        return [*calls, partial(self._unwritten.difference_update, data)]

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """See `graphllm.runtime.executor.Executor.get_state`."""
        memory, value = next(iter(self._values_of(name).items()))
        meta = value.operand.meta.bound()
        shape = meta.shape if rows is None else (rows, *meta.inner)
        operand = replace(value.operand, meta=replace(meta, shape=shape))
        return self._devices.owner(memory).copy_out(operand)

    def written(self, name: str) -> bool:
        """Return whether the host has written every buffer of the leaf, of which there is one."""
        return name not in self._unwritten

    def _values_of(self, name: str) -> dict[str, _Value]:
        values = self._values.get(self._leaves[name]) if name in self._leaves else None
        if not values:
            raise GraphError(f"no input or state {name!r} in any bound plan")
        return values

    def values(self) -> Iterator[tuple[str, str, Operand]]:
        """Yield name, memory and operand of every input and state."""
        for leaf, values in list(self._values.items()):
            for memory, value in values.items():
                yield leaf.name, memory, value.operand

    # -- weights
    def weight(self, name: str, pack: Pack | None, device: Device) -> Any:
        """Return the device's buffer of a weight, packed by ``pack``."""
        leaf = self._leaves[name]
        forms, key = self._weights.setdefault(leaf, {}), (pack, device.memory)
        with self._lock:  # another thread may prepare weights ahead
            if key not in forms:
                forms[key] = self._prepared(leaf, pack, device)
                self.packed += 1
        return forms[key]

    def _prepared(self, leaf: Tensor, pack: Pack | None, device: Device) -> Any:
        stored = self._source.meta(leaf.name)
        if stored is None or (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
            raise GraphError(f"weight {leaf.name!r} is {stored}, the graph wants {leaf.meta}")
        raw = self._source.raw(leaf.name)
        what = f"tensor {leaf.name!r}"
        try:
            with _out_of_memory_as(
                device, what, raw.nbytes, "fewer layers there need less", "gpu_layers"
            ):
                made = device.prepare(pack, raw, leaf.meta)
        except OutOfMemory:
            raise
        except GraphllmError as error:
            raise type(error)(f"{what}: {error}") from None
        if pack is not None:
            self._source.release(leaf.name)
        return made

    def weight_buffers(self) -> Iterator[Any]:
        """Yield the device buffer of every prepared weight."""
        for forms in list(self._weights.values()):
            yield from forms.values()

    def cache_sizes(self) -> dict[str, int]:
        """Return the number of leaves, of buffers of inputs and states, and of prepared weights."""
        values, weights = len(list(self.values())), len(self._weights)
        return {"leaves": len(self._leaves), "values": values, "weights": weights}

    def clear(self) -> None:
        """Release all buffers and the weight source, even if a graph is still alive."""
        self._values.clear()
        self._weights.clear()
        self._source = Arrays({})

    # -- accounting
    def held(self) -> Iterator[tuple[str, str, int]]:
        """Yield memory, kind and bytes of every buffer."""
        for forms in list(self._weights.values()):
            yield from ((memory, "weights", made.nbytes) for (_, memory), made in forms.items())
        for _, memory, operand in self.values():
            yield memory, "inputs and state", operand.buffer.nbytes


# ---------------------------------------------------------------------------------- fed arrays


def fits(array: np.ndarray, meta: Meta) -> bool:
    """Return whether ``array`` has the shape of ``meta``, which has no Var.

    For a block format the array has rows of bytes, [rows, row_bytes].
    """
    if meta.dtype.numpy is not None:
        return array.shape == meta.shape
    return array.ndim > 0 and len(array) == meta.rows and array.nbytes == meta.nbytes


def converted(what: str, data: Any, kind: DType) -> np.ndarray:
    """Convert ``data`` to an array of dtype ``kind``, or of bytes for a block format.

    Floats may be rounded. Any other change of a value raises GraphError: a float or complex number
    for an integer dtype, an integer out of range, a finite float that would become infinite.

    Args:
        what: name of the data in errors.
        data: an array or anything that `numpy.asarray` accepts.
        kind: dtype of the result.
    """
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise GraphError(f"{what} is not an array: {error}") from None
    target = kind.numpy or np.dtype(np.uint8)
    if array.dtype == target:
        return array
    if kind.numpy is None:
        raise GraphError(f"{what} takes the bytes of {kind} blocks (uint8), not {array.dtype}")
    given, wanted = _number(array.dtype), _number(target)
    if not given or ((given, wanted) == ("float", "integer") and array.size):
        raise GraphError(f"{what} takes {kind}, not {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(target)
        if given == "float":
            lost = np.isinf(made) & np.isfinite(array)
        else:
            lost = (made.astype(array.dtype) != array) | ((made < 0) != (array < 0))
    if lost.any():
        raise GraphError(f"{what} takes {kind}, which cannot hold {array[lost].flat[0]}")
    return made


def _number(kind: np.dtype) -> str:
    """Return "integer", "float", or an empty string for any other dtype."""
    if kind.kind in "bui":
        return "integer"
    return "float" if kind.kind == "f" or kind == BF16.numpy else ""


# -------------------------------------------------------------------------------------- allocation


@contextmanager
def _out_of_memory_as(
    device: Device, what: str, nbytes: int, hint: str, argument: str
) -> Iterator[None]:
    """Raise OutOfMemory with this description if the device runs out of memory inside.

    Args:
        device: the device.
        what: what the allocation is for.
        nbytes: size of the allocation.
        hint: what to do.
        argument: argument that would avoid the error.
    """
    try:
        yield
    except OutOfMemory as error:
        known = error.needed, error.free
        raise OutOfMemory(what, device.memory, *known, hint, argument) from None
    except MemoryError:
        known = nbytes, device.free()
        raise OutOfMemory(what, device.memory, *known, hint, argument) from None


def allocate(device: Device, nbytes: int, what: str) -> Any:
    """Allocate a buffer on the device for ``what``. OutOfMemory if that fails."""
    with _out_of_memory_as(device, what, nbytes, "a smaller context needs less", "context"):
        return device.alloc(nbytes)
