"""Structs that kernels take by value, packed by field name.

The declaration in the CUDA source is the only definition of such a struct: its names, types, order
and padding are read from there.

    POOL = ArgumentStruct("kv_cache.cuh", "Pool")
    POOL.pack(at=address, stride=bytes_per_slot, slot=slots, kind=0)
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from .source import SOURCES

Value = int | float | bytes | Sequence[bytes] | Sequence[int]

# struct format and size of the scalar types of common.cuh; pointers are "Q".
_SCALARS = {
    "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "int": "i", "u64": "Q", "i64": "q",
    "float": "f", "double": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One field: ``scalar`` is its `struct` format, or "" for a nested struct."""

    name: str
    offset: int
    scalar: str
    size: int  # bytes of one element
    count: int  # elements of an array; 0: no array


class ArgumentStruct:
    """A struct declared in one of the CUDA sources.

    Args:
        file: name of the .cu or .cuh file that declares it.
        name: name of the struct.
    """

    def __init__(self, file: str, name: str) -> None:
        self.file, self.name = file, name

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """All fields by name, in order."""
        return self._layout[0]

    @cached_property
    def _given(self) -> Set[str]:
        """Names of the fields that `pack` takes."""
        return self.fields.keys() - {"padding"}

    @property
    def size(self) -> int:
        """sizeof the struct."""
        return self._layout[1]

    @property
    def alignment(self) -> int:
        return self._layout[2]

    def pack(self, **values: Value) -> bytes:
        """The struct's bytes. Every field except ``padding`` must be given.

        A nested struct is given as its own packed bytes, an array of structs as a sequence of them.
        A short array is filled with zeros.

        Raises:
            TypeError: a field is missing or unknown.
            ValueError: the bytes of a nested struct, or the elements of an array, do not fit.
        """
        if values.keys() != self._given:
            wrong = sorted(values.keys() ^ self._given)
            raise TypeError(f"{self.file}: struct {self.name}: missing or unknown: {wrong}")
        packed = bytearray(self.size)
        for name, value in values.items():
            field = self.fields[name]
            elements = list(value) if field.count else [value]  # type: ignore[arg-type]
            if len(elements) > max(1, field.count):
                raise ValueError(f"{self.name}.{name} has {field.count} elements")
            for index, element in enumerate(elements):
                self._put(packed, field, field.offset + index * field.size, element)
        return bytes(packed)

    def _put(self, packed: bytearray, field: Field, offset: int, value: object) -> None:
        if field.scalar:
            struct.pack_into(f"<{field.scalar}", packed, offset, value)
        elif isinstance(value, bytes) and len(value) == field.size:
            packed[offset : offset + field.size] = value
        else:
            raise ValueError(f"{self.name}.{field.name} takes {field.size} bytes")

    @cached_property
    def _layout(self) -> tuple[dict[str, Field], int, int]:
        """Fields, size and alignment, by the rules of C."""
        text = re.sub(r"//[^\n]*", "", (SOURCES / self.file).read_text("utf-8"))
        found = re.search(rf"struct {self.name} \{{([^}}]*)\}};", text)
        assert found is not None, f"{self.file} declares no struct {self.name}"
        fields: dict[str, Field] = {}
        offset, alignment = 0, 1
        for declaration in found[1].split(";"):
            match = re.match(r"\s*(?:const\s+)?(\w+)(.*)", declaration, re.S)
            if match is None:
                continue
            for declarator in match[2].split(","):
                name, scalar, size, align, count = self._declared(match[1], declarator)
                offset = -(-offset // align) * align
                fields[name] = Field(name, offset, scalar, size, count)
                offset += size * max(1, count)
                alignment = max(alignment, align)
        return fields, -(-offset // alignment) * alignment, alignment

    def _declared(self, kind: str, declarator: str) -> tuple[str, str, int, int, int]:
        """Name, format, size, alignment and array length of one declarator."""
        match = re.match(r"\s*(\*?)\s*(\w+)(?:\[(\d+)\])?\s*$", declarator)
        assert match is not None, f"{self.file}: {self.name}: {declarator!r}"
        scalar = "Q" if match[1] else _SCALARS.get(kind, "")
        count = int(match[3] or 0)
        if scalar:
            size = struct.calcsize(f"<{scalar}")
            return match[2], scalar, size, size, count
        nested = ArgumentStruct(_declaring_file(kind), kind)
        return match[2], "", nested.size, nested.alignment, count


def _declaring_file(name: str) -> str:
    """The header that declares the struct ``name``."""
    for path in sorted(SOURCES.glob("*.cuh")):
        if f"struct {name} {{" in path.read_text("utf-8"):
            return path.name
    raise AssertionError(f"no header declares struct {name}")
