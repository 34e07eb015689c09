"""Loader of compiled kernels: maps an object file into memory and resolves its addresses.

A kernel is a self-contained ELF object file that refers only to its own sections and to a few
functions of the C library, so loading it is a copy and a few additions. LLVM's loader does the same
after an import of llvmlite; it is used on other systems than Linux on x86-64 or AArch64.

Sources: System V ABI, "Object Files"; its x86-64 supplement, "Relocation Types"; ELF for the Arm
64-bit Architecture, "Relocation".
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_ELF = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE = 1  # file type
_X86_64, _AARCH64 = 62, 183  # machines
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}
_SYMTAB, _RELA, _NOBITS = 2, 4, 8  # section types
_WRITE, _ALLOC = 1, 2  # section flags
_FUNCTION, _GLOBAL = 2, 1  # symbol type and binding
_RESERVED = 0xFF00  # section numbers from here on have a meaning of their own
_MAX_BYTES = 64 << 20  # bytes of a kernel in memory


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
            if section.kind == _RELA and section.info in self._offsets:
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
            if symbol.info & 15 == _FUNCTION and symbol.section in self._offsets:
                start = self._base(symbol.section) + symbol.value
                yield Function(symbol.name, start, symbol.nbytes)

    # ---------------------------------------------------------------------------- the file

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(form, self._code, offset)
        except (struct.error, OverflowError):
            raise ValueError("it is truncated") from None

    def _read_header(self) -> None:
        kind = struct.pack("<HH", _RELOCATABLE, _machine())
        if self._code[:7] != _ELF or self._code[16:20] != kind:
            raise ValueError("its code is no object file for this machine")
        (table,) = self._unpack("<Q", 0x28)
        size, count, names = self._unpack("<HHH", 0x3A)
        if size != 64:
            raise ValueError(f"its section headers have {size} bytes")
        self._sections = [
            _Section(*self._unpack("<IIQQQQIIQQ", table + i * size)) for i in range(count)
        ]
        for each in self._sections:
            end = each.offset if each.kind == _NOBITS else each.offset + each.nbytes
            if end > len(self._code) or each.nbytes > _MAX_BYTES:
                raise ValueError("a section lies outside the file")
        if names >= count:
            raise ValueError("its sections have no names")
        self._names = self._sections[names]
        tables = [each for each in self._sections if each.kind == _SYMTAB]
        self._symbols = list(self._read_symbols(tables[0])) if tables else []

    def _read_symbols(self, table: _Section) -> Iterator[_Symbol]:
        if table.link >= len(self._sections):
            raise ValueError("its symbols have no names")
        names = self._sections[table.link]
        for at in range(table.offset, table.offset + table.nbytes, 24):
            name, info, _, section, value, nbytes = self._unpack("<IBBHQQ", at)
            yield _Symbol(self._text(names, name), info, section, value, nbytes)

    def _text(self, names: _Section, offset: int) -> str:
        """A name in a section of names."""
        start, limit = names.offset + offset, names.offset + names.nbytes
        end = self._code.find(b"\0", start, limit)
        if end < 0:
            raise ValueError("a name lies outside the file")
        return self._code[start:end].decode("utf-8", "replace")

    # -------------------------------------------------------------------------- in memory

    def _place(self) -> None:
        """Copy the sections that a program needs: first those that are not written."""
        self._offsets: dict[int, int] = {}
        end, self._read_only = 0, 0
        for written in (0, _WRITE):
            for number, section in enumerate(self._sections):
                if section.flags & (_ALLOC | _WRITE) != _ALLOC | written:
                    continue
                if self._text(self._names, section.name) == ".eh_frame":
                    continue  # nothing unwinds the stack through a kernel
                alignment = max(1, section.alignment)
                if alignment > mmap.PAGESIZE:
                    raise ValueError(f"a section is aligned to {alignment} bytes")
                self._offsets[number] = end = _align(end, alignment)
                end += section.nbytes
            if not written:
                end = self._reserve_veneers(end)
            end = _align(end, mmap.PAGESIZE)
            self._read_only = self._read_only or end
        if not 0 < end <= _MAX_BYTES:
            raise ValueError(f"it takes {end} bytes of memory")
        self._start = _map(end)
        for number, offset in self._offsets.items():
            section = self._sections[number]
            if section.kind != _NOBITS:
                data = self._code[section.offset : section.offset + section.nbytes]
                ctypes.memmove(self._start + offset, data, len(data))

    def _reserve_veneers(self, end: int) -> int:
        """Reserve memory from offset ``end`` on for jumps to functions of other libraries, which
        AArch64 cannot call directly. Returns the offset behind it."""
        self._veneers: dict[str, int] = {}
        if _machine() == _AARCH64:
            for symbol in self._symbols:
                if symbol.section == 0 and symbol.name not in self._veneers:
                    self._veneers[symbol.name] = end = _align(end, 8)
                    end += len(_veneer(0))
        return end

    def _base(self, number: int) -> int:
        """Address of a section in memory."""
        if number not in self._offsets:
            raise ValueError(f"section {number} is not in memory")
        return self._start + self._offsets[number]

    def _relocate(self, table: _Section) -> None:
        """Write the addresses that a section refers to."""
        section, base = self._sections[table.info], self._base(table.info)
        patch = _patch_aarch64 if _machine() == _AARCH64 else _patch_x86_64
        for at in range(table.offset, table.offset + table.nbytes, 24):
            offset, info, addend = self._unpack("<QQq", at)
            kind, number = info & 0xFFFFFFFF, info >> 32
            nbytes = 8 if kind in _WORDS else 4
            if number >= len(self._symbols) or offset + nbytes > section.nbytes:
                raise ValueError("a relocation lies outside the file")
            place = base + offset
            value = self._value(self._symbols[number], kind in _CALLS) + addend
            old = int.from_bytes(ctypes.string_at(place, nbytes), "little")
            new = patch(kind, old, value, place) & (1 << 8 * nbytes) - 1
            ctypes.memmove(place, new.to_bytes(nbytes, "little"), nbytes)

    def _value(self, symbol: _Symbol, called: bool) -> int:
        if symbol.section == 0:
            address = symbol_address(symbol.name)
            if not called or symbol.name not in self._veneers:
                return address
            veneer, code = self._start + self._veneers[symbol.name], _veneer(address)
            ctypes.memmove(veneer, code, len(code))
            return veneer
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


@cache
def _machine() -> int:
    """ELF's number of this machine; 0 for machines whose code LLVM loads."""
    return _MACHINES.get(platform.machine(), 0) if sys.platform == "linux" else 0


def has_loader() -> bool:
    """Whether `MachineCode` loads the kernels of this machine."""
    return _machine() != 0


# ------------------------------------------------------------------------------------ relocations
# The numbers are R_X86_64_64, _PC32, _PLT32 and R_AARCH64_ABS64, _MOVW_UABS_G0 to _G3 (with the
# variants _NC), _JUMP26 and _CALL26. Those of the two machines differ.

_WORDS = (1, 257)  # relocations of 8 bytes
_CALLS = (282, 283)


def _patch_x86_64(kind: int, old: int, value: int, place: int) -> int:
    if kind == 1:
        return value
    if kind in (2, 4):
        return _within(value - place, 32)
    raise ValueError(f"relocations of type {kind} are not supported")


def _patch_aarch64(kind: int, old: int, value: int, place: int) -> int:
    if kind == 257:
        return value
    if 263 <= kind <= 269:  # 16 bits of an address in bits 5 to 20 of the instruction
        part = value >> 16 * ((kind - 263) // 2) & 0xFFFF
        return old & ~(0xFFFF << 5) | part << 5
    if kind in _CALLS:
        return old & ~0x3FFFFFF | _within(value - place, 28) >> 2 & 0x3FFFFFF
    raise ValueError(f"relocations of type {kind} are not supported")


def _within(distance: int, bits: int) -> int:
    if not -(1 << bits - 1) <= distance < 1 << bits - 1:
        raise ValueError("a relative address is too far away")
    return distance


def _veneer(address: int) -> bytes:
    """AArch64 code that jumps to an address: ldr x16, .+8; br x16; the address."""
    return struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)


# ----------------------------------------------------------------------------------------- memory


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
