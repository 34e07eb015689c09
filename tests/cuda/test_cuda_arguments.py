"""Structs that kernels take by value: their layout in Python is that of the compiler."""

from __future__ import annotations

import struct

import pytest

from graphllm.backends.cuda.runtime import source
from graphllm.backends.cuda.runtime.arguments import ArgumentStruct

STRUCTS = (
    ("attention.cuh", "Attention"), ("common.cuh", "BlockSample"),
    ("formats.cuh", "Planes"), ("copy.cu", "Shape"),
    ("experts.cuh", "Experts"), ("experts.cuh", "Group"), ("head_rotation.cuh", "Heads"),
    ("kv_cache.cuh", "Pool"), ("matrices.cuh", "Matrices"), ("matrices.cuh", "Matrix"),
    ("new_tokens.cuh", "NewTokens"), ("penalties.cu", "Penalties"),
    ("quantize.cuh", "Target"), ("quantize.cuh", "Targets"), ("split_norm.cuh", "SplitNorm"),
    ("rope.cuh", "Rotation"), ("sampling.cuh", "Settings"), ("step.cu", "State"),
    ("block_tables.cuh", "TableGroup"), ("drafts.cu", "Drafts"), ("drafts.cu", "Rows"),
)  # fmt: skip


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """A function that returns a struct declared in the given text."""

    def make(text: str, name: str = "S") -> ArgumentStruct:
        (tmp_path / "own.cuh").write_text(text)
        monkeypatch.setattr("graphllm.backends.cuda.runtime.arguments.SOURCES", tmp_path)
        return ArgumentStruct("own.cuh", name)

    return make


def test_fields_are_placed_as_in_c(declared):
    own = declared(
        "struct S {\n  const u8 *a, *b;  // two\n  int n;\n  float x;\n  i64 k[2];\n};\n"
    )
    assert [f.offset for f in own.fields.values()] == [0, 8, 16, 20, 24] and own.size == 40
    packed = own.pack(a=1, b=2, n=-3, x=0.5, k=[4, 5])
    assert packed == struct.pack("<QQifqq", 1, 2, -3, 0.5, 4, 5)


def test_padding_and_nested_structs(declared):
    text = "struct P {\n  i64 stride;\n  int kind;\n};\nstruct S {\n  int n;\n  P p[2];\n};\n"
    own, inner = declared(text), declared(text, "P")
    assert (inner.size, own.size, own.fields["p"].offset) == (16, 40, 8)
    packed = own.pack(n=7, p=[inner.pack(stride=1, kind=2)])
    assert packed == struct.pack("<i4xqi4x", 7, 1, 2) + bytes(16)


@pytest.mark.parametrize("values", [{}, {"n": 1, "m": 2}, {"m": 2}])
def test_missing_and_unknown_fields_are_named(values, declared):
    with pytest.raises(TypeError, match="struct S: missing or unknown"):
        declared("struct S {\n  int n;\n};\n").pack(**values)


def test_too_many_elements(declared):
    with pytest.raises(ValueError, match="has 2 elements"):
        declared("struct S {\n  int n[2];\n};\n").pack(n=[1, 2, 3])


@pytest.mark.nvrtc
@pytest.mark.parametrize("file, name", STRUCTS)
def test_the_compiler_agrees(file, name, tmp_path, monkeypatch):
    own = ArgumentStruct(file, name)
    text = (source.SOURCES / file).read_text("utf-8") if file.endswith(".cu") else ""
    checks = [f'static_assert(sizeof({name}) == {own.size}, "size");']
    checks += [
        f'static_assert(__INTADDR__(&((({name}*)0)->{f.name})) == {f.offset}, "{f.name}");'
        for f in own.fields.values()
    ]
    include = "" if text else f'#include "{file}"\n'
    source._headers()
    (tmp_path / "check.cu").write_text("\n".join([include + text, *checks]))
    monkeypatch.setattr(source, "SOURCES", tmp_path)
    source.compile_module(source.Module("check.cu"), "sm_80")
