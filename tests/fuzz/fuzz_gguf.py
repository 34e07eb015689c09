"""Fuzzing of GGUF headers: ``fuzz_gguf.py FOLDER COUNT SEED``, run in a separate process.

Each case is a small valid file with a wrong key, a wrong tensor or wrong bytes. Loading it and
computing logits must succeed or raise graphllm's own error, within limits of memory and time.
Prints the number of cases by outcome as JSON. Failures are printed on standard error, and the exit
code is 1.
"""

from __future__ import annotations

import collections
import json
import random
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import graphllm
from graphllm.errors import GraphllmError

MEMORY = 512 << 20  # bytes that all cases together may map beyond the interpreter's own
SECONDS = 5.0  # CPU time of one case
PIECES = json.loads((Path(__file__).parents[1] / "golden" / "tiny_spm.json").read_text())
DIM, HEADS, KV, WIDTH, HIDDEN, LAYERS = 24, 3, 1, 8, 20, 2

U8, I32, U32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = 0, 5, 4, 6, 7, 8, 9, 10, 11, 12
CODES = {U8: "<B", I32: "<i", U32: "<I", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d"}


# ------------------------------------------------------------------------------------ valid files


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == TEXT:
        return _text(value)
    if kind == ARRAY:
        inner, items = value
        head = struct.pack("<IQ", inner, len(items))
        return head + b"".join(_value(inner, item) for item in items)
    return struct.pack(CODES[kind], value)


@dataclass
class Info:
    """Entry of a tensor; ``dims`` are innermost first."""

    name: str
    dims: list[int]
    offset: int
    kind: int = 0


@dataclass
class File:
    """A GGUF file in parts, so that an invalid one can be written."""

    keys: list[tuple[str, int, Any]] = field(default_factory=list)
    tensors: list[Info] = field(default_factory=list)
    data: bytes = b""

    def header(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))
        for key, kind, value in self.keys:
            head += _text(key) + struct.pack("<I", kind) + _value(kind, value)
        for t in self.tensors:
            dims = struct.pack(f"<{len(t.dims)}Q", *t.dims)
            head += _text(t.name) + struct.pack("<I", len(t.dims)) + dims
            head += struct.pack("<IQ", t.kind, t.offset)
        return head + bytes(-len(head) % 32)

    def copy(self) -> File:
        tensors = [Info(t.name, list(t.dims), t.offset, t.kind) for t in self.tensors]
        return File(list(self.keys), tensors, self.data)

    def with_key(self, name: str, kind: int, value: Any) -> File:
        """Return a copy in which the key has this value; a missing key is added."""
        new = self.copy()
        new.keys = [k for k in new.keys if k[0] != name] + [(name, kind, value)]
        return new


def valid(arch: str) -> File:
    """Return a small model of ``arch`` with random weights."""
    names = [("token_embd", [DIM, len(PIECES["pieces"])]), ("output_norm", [DIM])]
    norms = ["attn_norm", "ffn_norm"]
    if arch == "gemma3":
        norms += ["post_attention_norm", "post_ffw_norm"]
    for i in range(LAYERS):
        at = f"blk.{i}."
        names += [(at + name, [DIM]) for name in norms]
        if arch == "gemma3":
            names += [(at + "attn_q_norm", [WIDTH]), (at + "attn_k_norm", [WIDTH])]
        names += [
            (at + "attn_q", [DIM, HEADS * WIDTH]), (at + "attn_k", [DIM, KV * WIDTH]),
            (at + "attn_v", [DIM, KV * WIDTH]), (at + "attn_output", [HEADS * WIDTH, DIM]),
            (at + "ffn_gate", [DIM, HIDDEN]), (at + "ffn_up", [DIM, HIDDEN]),
            (at + "ffn_down", [HIDDEN, DIM]),
        ]  # fmt: skip
    file, rng = File(_keys(arch)), np.random.default_rng(0)
    for name, dims in names:
        values = rng.standard_normal(int(np.prod(dims))).astype(np.float32).tobytes()
        file.tensors.append(Info(name + ".weight", list(dims), len(file.data)))
        file.data += values + bytes(-len(values) % 32)
    return file


def _keys(arch: str) -> list[tuple[str, int, Any]]:
    own: list[tuple[str, int, Any]] = [
        ("context_length", U32, 128), ("embedding_length", U32, DIM), ("block_count", U32, LAYERS),
        ("feed_forward_length", U32, HIDDEN), ("attention.head_count", U32, HEADS),
        ("attention.head_count_kv", U32, KV), ("attention.layer_norm_rms_epsilon", F32, 1e-5),
    ]  # fmt: skip
    if arch == "gemma3":
        own += [("attention.key_length", U32, WIDTH), ("attention.sliding_window", U32, 4)]
    return [
        ("general.architecture", TEXT, arch),
        *((f"{arch}.{name}", kind, value) for name, kind, value in own),
        ("tokenizer.ggml.model", TEXT, "llama"),
        ("tokenizer.ggml.tokens", ARRAY, (TEXT, PIECES["pieces"])),
        ("tokenizer.ggml.scores", ARRAY, (F32, PIECES["scores"])),
        ("tokenizer.ggml.token_type", ARRAY, (I32, PIECES["types"])),
    ]


# ----------------------------------------------------------------------------------------- damage

VALUES = [
    (U32, 0), (U32, 1), (U32, 2), (U32, 5), (U32, 64), (U32, 2**31), (U32, 2**32 - 1), (I32, -1),
    (U64, 2**40), (U64, 2**64 - 1), (I64, -(2**62)), (F32, 0.0), (F32, -1.0), (F32, float("nan")),
    (F32, float("inf")), (F64, 1e308), (F64, 1e-320), (BOOL, 1), (TEXT, "linear"), (TEXT, ""),
    (ARRAY, (U32, [1, 2])), (ARRAY, (TEXT, [])), (ARRAY, (F32, [float("nan")] * 9)),
]  # fmt: skip
MORE = (
    "attention.key_length", "attention.value_length", "rope.freq_base", "rope.freq_base_swa",
    "rope.dimension_count", "rope.scaling.factor", "vocab_size", "attention.sliding_window",
    "attention.sliding_window_pattern",
)  # fmt: skip
GENERAL = (
    "general.alignment", "split.count", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token", "general.name",
)  # fmt: skip
NUMBERS = (0, 1, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def every_value(arch: str) -> Iterator[tuple[str, bytes]]:
    """Yield files with each known or plausible key set to each strange value, or removed."""
    base = valid(arch)
    names = [k for k, _, _ in base.keys]
    for name in dict.fromkeys([*names, *(f"{arch}.{m}" for m in MORE), *GENERAL]):
        for kind, value in VALUES:
            changed = base.with_key(name, kind, value)
            if name.endswith("scaling.factor"):
                changed = changed.with_key(f"{arch}.rope.scaling.type", TEXT, "linear")
            yield f"{arch} {name} = {value!r}", changed.header() + base.data
        if name in names:
            less = base.copy()
            less.keys = [k for k in less.keys if k[0] != name]
            yield f"{arch} without {name}", less.header() + base.data


def damaged_tensor(base: File, rng: random.Random) -> File:
    """Return a file with one wrong tensor entry."""
    new = base.copy()
    t = rng.choice(new.tensors)
    what = rng.randrange(8)
    if what == 0:
        t.dims[rng.randrange(len(t.dims))] = rng.choice(NUMBERS)
    elif what == 1:
        t.dims = t.dims[::-1]
    elif what == 2:
        t.dims = rng.choice(([], [1, *t.dims], [*t.dims, 1], t.dims[:1], [2**32, 2**32]))
    elif what == 3:
        t.kind = rng.randrange(45)
    elif what == 4:
        t.offset = rng.choice([*NUMBERS, t.offset + 32, max(0, t.offset - 32)])
    elif what == 5:
        t.name = rng.choice(("", rng.choice(new.tensors).name, "blk.9.attn_q.weight", "x" * 70000))
    elif what == 6:
        new.tensors.remove(t)
    else:
        other = rng.choice(new.tensors)
        t.name, other.name = other.name, t.name
    return new


def damaged_bytes(header: bytes, rng: random.Random) -> bytes:
    """Return a header with flipped, missing, additional or overwritten bytes."""
    data = bytearray(header)
    at = rng.randrange(len(data))
    if rng.random() < 0.5:  # half of them in the counts, the configuration and the entries
        at = rng.choice((rng.randrange(700), len(data) - 1 - rng.randrange(1500)))
    what = rng.randrange(6)
    if what == 0:
        return bytes(data[:at])
    if what == 1:
        del data[at : at + rng.randrange(1, 40)]
    elif what == 2:
        data[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif what == 3:
        size = rng.choice((4, 8))
        data[at : at + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")
    else:
        for spot in (at, *(rng.randrange(len(data)) for _ in range(rng.choice((0, 0, 0, 5))))):
            data[spot] ^= 1 << rng.randrange(8)
    return bytes(data)


def cases(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``count`` pairs (description, bytes of the file)."""
    rng = random.Random(seed)
    planned = [*every_value("llama"), *every_value("gemma3")]
    rng.shuffle(planned)
    yield from planned[: count // 2]
    bases = [valid("llama"), valid("gemma3")]
    headers = [base.header() for base in bases]
    for number in range(count - min(count // 2, len(planned))):
        which = rng.randrange(2)
        if number % 4 == 0:
            yield f"tensor {number}", damaged_tensor(bases[which], rng).header() + bases[which].data
        else:
            yield f"bytes {number}", damaged_bytes(headers[which], rng) + bases[which].data


# --------------------------------------------------------------------------------------- campaign


class TimeLimitReached(BaseException):
    """A case took too long. It is not an Exception, so that no handler can swallow it."""


def _raise_time_limit(*_: object) -> None:
    raise TimeLimitReached


def run(path: Path) -> str:
    """Load the file, compute logits and tokenize a text; return the outcome in a word."""
    try:
        model = graphllm.load(path, device="reference", context=16)
        logits = model.logits([1, 5, 3])
        model.tokenizer.decode(model.encode("Hello wörld, \u65e5\u672c \n<s> 12"))
    except GraphllmError as error:
        if not str(error) or "\n" in str(error) or len(str(error)) > 1000:
            raise AssertionError(f"not one clear line: {error}") from error
        return type(error).__name__
    assert logits.shape == (3, model.decoder.cfg.vocab)
    return "ran"


def main() -> None:
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")  # NaN, if a weight has the value of a key
    np.seterr(all="ignore")
    path = folder / "case.gguf"
    for arch in ("llama", "gemma3"):
        base = valid(arch)
        path.write_bytes(base.header() + base.data)
        assert run(path) == "ran", arch
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    signal.signal(signal.SIGPROF, _raise_time_limit)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong, slowest = 0, 0.0
    for name, data in cases(count, seed):
        path.unlink()  # models of earlier cases may still map it: reading cut pages ends in SIGBUS
        path.write_bytes(data)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            outcomes[run(path)] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong += 1
            (folder / f"wrong{wrong}.gguf").write_bytes(data)
            print(f"--- {name}: {type(error).__name__}: {error}", file=sys.stderr)
            print("".join(traceback.format_exc().splitlines(True)[-7:]), file=sys.stderr)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - start)
    print(json.dumps({"outcomes": outcomes, "wrong": wrong, "slowest": slowest}))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
