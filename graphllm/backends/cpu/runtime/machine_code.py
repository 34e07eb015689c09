"""Loader of compiled kernels: maps an object file into memory and resolves its addresses.

A kernel is a self-contained ELF object file that refers only to its own sections and to a few
functions of the C library, so loading it is a copy and a few additions. LLVM's loader does the same
after an import of llvmlite; it is used on other systems than x86-64 Linux.

Sources: System V ABI, "Object Files"; its x86-64 supplement, "Relocation Types".
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_ELF_X86_64 = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE, _X86_64 = 1, 62  # file type and machine
_SYMTAB, _RELA, _NOBITS, _UNWIND = 2, 4, 8, 0x70000001  # section types
_WRITE, _ALLOC = 1, 2  # section flags
_FUNCTION, _GLOBAL = 2, 1  # symbol type and binding
_COMMON, _RESERVED = 0xFFF2, 0xFF00  # section numbers with a meaning of their own
_ABSOLUTE_64, _RELATIVE_32, _CALL_32 = 1, 2, 4  # R_X86_64_64, _PC32, _PLT32
_LARGEST = 64 << 20  # bytes of a kernel in memory


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int
    entry: int


class _Symbol(NamedTuple):
    name: str
    info: int
    section: int
    value: int
    nbytes: int


class Function(NamedTuple):
    """A function in memory."""

    name: str
    address: int
    nbytes: int


class MachineCode:
    """The machine code of a kernel in memory, where it stays until the process ends.

    Args:
        code: an object file.

    Raises:
        ValueError: it is damaged, or of a kind that is not supported.
        OSError: memory for it cannot be mapped.
    """

    def __init__(self, code: bytes) -> None:
        self._code = code
        self._read_header()
        self._place()
        for section in self._sections:
            if section.kind == _RELA and self._target(section.info) is not None:
                self._relocate(section)
        self._protect()

    def address(self, name: str) -> int:
        """Return the address of a global function. ValueError if there is none."""
        for symbol in self._symbols:
            if symbol.name == name and symbol.info == _GLOBAL << 4 | _FUNCTION and symbol.section:
                return self._base(symbol.section) + symbol.value
        raise ValueError(f"it does not define {name}")

    def functions(self) -> Iterator[Function]:
        """All functions, for debuggers and profilers."""
        for symbol in self._symbols:
            if symbol.info & 15 == _FUNCTION and self._target(symbol.section) is not None:
                start = self._base(symbol.section) + symbol.value
                yield Function(symbol.name, start, symbol.nbytes)

    # ---------------------------------------------------------------------------- the file

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(form, self._code, offset)
        except (struct.error, OverflowError):
            raise ValueError("it is truncated") from None

    def _read_header(self) -> None:
        if not is_supported(self._code):
            raise ValueError("its code is no ELF file for x86-64")
        (table,) = self._unpack("<Q", 0x28)
        size, count = self._unpack("<HH", 0x3A)
        if size != 64:
            raise ValueError(f"its section headers have {size} bytes")
        self._sections = [
            _Section(*self._unpack("<IIQQQQIIQQ", table + i * size)) for i in range(count)
        ]
        for each in self._sections:
            end = each.offset if each.kind == _NOBITS else each.offset + each.nbytes
            if end > len(self._code) or each.nbytes > _LARGEST:
                raise ValueError("a section lies outside the file")
        tables = [each for each in self._sections if each.kind == _SYMTAB]
        self._symbols = list(self._read_symbols(tables[0])) if tables else []

    def _read_symbols(self, table: _Section) -> Iterator[_Symbol]:
        if table.link >= len(self._sections):
            raise ValueError("its symbols have no names")
        names = self._sections[table.link]
        text = self._code[names.offset : names.offset + names.nbytes]
        for at in range(table.offset, table.offset + table.nbytes, 24):
            name, info, _, section, value, nbytes = self._unpack("<IBBHQQ", at)
            if name >= len(text) and name:
                raise ValueError("a symbol has no name")
            label = text[name : text.find(b"\0", name)].decode("utf-8", "replace")
            yield _Symbol(label, info, section, value, nbytes)

    # -------------------------------------------------------------------------- in memory

    def _place(self) -> None:
        """Copy the sections that a program needs: first those that are not written."""
        self._offsets: dict[int, int] = {}
        end, self._read_only = 0, 0
        for written in (0, _WRITE):
            for number, section in enumerate(self._sections):
                # Nothing unwinds the stack through a kernel.
                if section.flags & (_ALLOC | _WRITE) != _ALLOC | written or section.kind == _UNWIND:
                    continue
                alignment = max(1, section.alignment)
                if alignment > mmap.PAGESIZE:
                    raise ValueError(f"a section is aligned to {alignment} bytes")
                self._offsets[number] = end = _align(end, alignment)
                end += section.nbytes
            end = _align(end, mmap.PAGESIZE)
            self._read_only = self._read_only or end
        if not 0 < end <= _LARGEST:
            raise ValueError(f"it takes {end} bytes of memory")
        self._start, self._nbytes = _map(end), end
        for number, offset in self._offsets.items():
            section = self._sections[number]
            if section.kind != _NOBITS:
                data = self._code[section.offset : section.offset + section.nbytes]
                ctypes.memmove(self._start + offset, data, len(data))

    def _target(self, number: int) -> int | None:
        """Offset of a section in memory, None if it is not there."""
        return self._offsets.get(number)

    def _base(self, number: int) -> int:
        """Address of a section in memory."""
        if number not in self._offsets:
            raise ValueError(f"section {number} is not in memory")
        return self._start + self._offsets[number]

    def _relocate(self, table: _Section) -> None:
        """Write the addresses that a section refers to."""
        section, base = self._sections[table.info], self._base(table.info)
        for at in range(table.offset, table.offset + table.nbytes, 24):
            offset, info, addend = self._unpack("<QQq", at)
            kind, number = info & 0xFFFFFFFF, info >> 32
            nbytes = 8 if kind == _ABSOLUTE_64 else 4
            if number >= len(self._symbols) or offset + nbytes > section.nbytes:
                raise ValueError("a relocation lies outside the file")
            value = self._value(self._symbols[number]) + addend
            if kind in (_RELATIVE_32, _CALL_32):
                value -= base + offset
                if not -(1 << 31) <= value < 1 << 31:
                    raise ValueError("a relative address is too far away")
            elif kind != _ABSOLUTE_64:
                raise ValueError(f"relocations of type {kind} are not supported")
            word = (value & (1 << 64) - 1).to_bytes(8, "little")[:nbytes]
            ctypes.memmove(base + offset, word, nbytes)

    def _value(self, symbol: _Symbol) -> int:
        if symbol.section == 0:
            return symbol_address(symbol.name)
        if symbol.section >= _RESERVED:  # such as a variable without a section
            raise ValueError(f"{symbol.name} lies in section {symbol.section:#x}")
        return self._base(symbol.section) + symbol.value

    def _protect(self) -> None:
        """Make the code executable. No memory is writable and executable at the same time."""
        flags = mmap.PROT_READ | mmap.PROT_EXEC
        if self._read_only and _c_library().mprotect(
            ctypes.c_void_p(self._start), ctypes.c_size_t(self._read_only), flags
        ):
            raise OSError(ctypes.get_errno(), "machine code cannot be made executable")


def is_supported(code: bytes) -> bool:
    """Whether the bytes are an object file of the kind that `MachineCode` loads."""
    return code[:7] == _ELF_X86_64 and code[16:20] == struct.pack("<HH", _RELOCATABLE, _X86_64)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@cache
def _c_library() -> ctypes.CDLL:
    """The C library, in which functions of all libraries of the process are found."""
    return ctypes.CDLL(None, use_errno=True)


def _map(nbytes: int) -> int:
    """Map zeroed memory; it is never freed, as threads may run in it until the process ends."""
    reserve = _c_library().mmap
    reserve.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size, none = ctypes.c_size_t(nbytes), ctypes.c_void_p()
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = reserve(none, size, access, flags, -1, ctypes.c_long(0))
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes for machine code cannot be mapped")
    return address


@cache
def symbol_address(name: str) -> int:
    """Return the address of a function of the C library or, for kernels of users, of Numba.

    Raises ValueError if there is none.
    """
    for library in (None, "libm.so.6"):
        try:
            found = ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
        except (AttributeError, OSError):
            continue
        if found:
            return found
    from . import compiler

    found = compiler.symbol_address(name)
    if not found:
        raise ValueError(f"it calls {name}, which does not exist")
    return found
