"""Fuzzing of safetensors directories: ``fuzz_safetensors.py FOLDER COUNT SEED``, run in a separate
process.

Each case is a small valid directory, of one file or of two with an index, in which an entry, bytes
of a header or the index are wrong; some have large headers. Opening it and reading all tensors must
raise ModelFileError or give what the safetensors package reads, within limits of memory and time.
Prints the number of cases by outcome as JSON. Failures are printed on standard error, and the exit
code is 1.
"""

from __future__ import annotations

import collections
import copy
import itertools
import json
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
from fuzz_gguf import MEMORY, SECONDS, TimeLimitReached, _raise_time_limit

from graphllm.errors import ModelFileError
from graphllm.weights.safetensors import Safetensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "BOOL": 1}
NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**40, -1,
    1.0, 1e300, True, None, "1", [], {}, [1],
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", "F33", "f32", "F64", "F8_E4M3", "F4", "F6_E2M3", "C64", "x" * 70_000, "a\nb", "\ud800", "é",
    None, 5, [], {},
)  # fmt: skip
PATHS: tuple[Any, ...] = (
    *SHARDS, SINGLE, "", ".", "..", "../" + SHARDS[0], "/etc/passwd", "/" + SHARDS[0],
    "a\0.safetensors", "a\n.safetensors", "x/../" + SHARDS[0], "./" + SHARDS[0],
    "missing.safetensors", None, 3, [], {}, "x" * 5000 + ".safetensors",
)  # fmt: skip


# ------------------------------------------------------------------------------------ valid files


def entries(seed: int) -> tuple[dict[str, Any], bytes]:
    """Return a header and its data: a tensor of each readable dtype, with 0 to 3 dimensions."""
    rng = random.Random(seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    shapes = ([3], [2, 5], [2, 3, 4], [], [0, 4], [7], [1, 9], [6])
    for number, (kind, shape) in enumerate(zip(SIZES, shapes)):
        count = SIZES[kind]
        for size in shape:
            count *= size
        name = f"layer.{seed}.{number}"
        header[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [len(data), len(data) + count],
        }
        data += rng.randbytes(count)
    return header, data


def packed(header: Any, data: bytes) -> bytes:
    """Return the bytes of a file; ``header`` is any JSON value, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def index(homes: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}).encode()


# ----------------------------------------------------------------------------------------- damage


def damaged_header(header: dict[str, Any], rng: random.Random) -> Any:
    """Return a header with one wrong entry or wrong metadata."""
    new = copy.deepcopy(header)
    names = [name for name in new if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry = new[name]
    what = rng.randrange(10)
    if what == 0:
        entry["dtype"] = rng.choice((*TEXTS, *SIZES))
    elif what == 1:
        longer = [*entry["shape"], rng.choice(NUMBERS)]
        strange = (entry["shape"][1:], [1] * 40, [2**40, 2**40], [0, 2**63], rng.choice(NUMBERS))
        entry["shape"] = rng.choice((longer, *strange))
    elif what == 2:
        entry["data_offsets"][rng.randrange(2)] = rng.choice(NUMBERS)
    elif what == 3:
        entry["data_offsets"] = rng.choice((entry["data_offsets"][::-1], [0], [0, 0, 0], [], None))
    elif what == 4:
        entry["data_offsets"] = new[other]["data_offsets"]
    elif what == 5:
        del entry[rng.choice(list(entry))]
    elif what == 6:
        entry[rng.choice(("more", "Dtype", ""))] = rng.choice(NUMBERS)
    elif what == 7:
        new[rng.choice(TEXTS[:12])] = new.pop(name)
    elif what == 8:
        new["__metadata__"] = rng.choice((None, [], "x", {"a": 1}, {"a": None}, {"a": {}}, {}))
    else:
        new[name] = rng.choice((None, [], 3, "x", {}))
    return new


def damaged_bytes(data: bytes, rng: random.Random, within: int) -> bytes:
    """Return data with flipped, missing, added, doubled or overwritten bytes before ``within``."""
    new = bytearray(data)
    at = rng.randrange(8) if rng.random() < 0.15 else rng.randrange(within)
    what = rng.randrange(6)
    if what == 0:
        return bytes(new[:at])
    if what == 1:
        del new[at : at + rng.randrange(1, 40)]
    elif what == 2:
        new[at:at] = rng.choice((rng.randbytes(rng.randrange(1, 40)), b"[" * 5000, b"9" * 5000,
                                 b"NaN", b'"a":{"a":', b"\xef\xbb\xbf", b" "))  # fmt: skip
    elif what == 3:
        end = at + rng.randrange(1, 200)
        new[end:end] = new[at:end]
    else:
        for spot in (at, *(rng.randrange(len(new)) for _ in range(rng.choice((0, 0, 0, 5))))):
            new[spot] ^= 1 << rng.randrange(8)
    return bytes(new)


def damaged_homes(homes: dict[str, str], rng: random.Random) -> Any:
    """Return a weight_map with a wrong or missing file name, or no weight_map."""
    new: dict[str, Any] = dict(homes)
    name = rng.choice(list(new))
    what = rng.randrange(5)
    if what == 0:
        del new[name]
    elif what == 1:
        new[rng.choice(TEXTS[:12])] = rng.choice(SHARDS)
    elif what == 2:
        return rng.choice((None, [], "x", 3, {}, {name: SHARDS[0]}))
    else:
        new[name] = rng.choice(PATHS)
    return new


def large() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield headers of about 20 MB that need far more memory or time if read naively."""
    n = 20_000_000
    keys = b",".join(b'"%d":0' % i for i in range(1 << 20))
    for name, text in (
        ("lists", b'{"a":[' + b"[]," * (n // 3) + b"1]}"),
        ("keys", b"{" + keys + b"}"),
        ("string", b'{"a":"' + "\U0001f600".encode() + b"x" * n + b'"}'),
        ("digits", b'{"a":' + b"9" * n + b"}"),
        ("deep", b'{"a":' * (1 << 20)),
        ("shape", b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":[' + b"4294967296," * (1 << 20)
         + b"1]}}"),
        ("space", b"{" + b" " * n),
    ):  # fmt: skip
        yield f"large {name}", {SINGLE: packed(text, b"")}


def cases(count: int, seed: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield ``count`` pairs (description, files of the directory)."""
    rng = random.Random(seed)
    parts = [entries(0), entries(1)]
    whole = [packed(*part) for part in parts]
    homes = {name: shard for shard, (header, _) in zip(SHARDS, parts) for name in list(header)[1:]}
    shards = dict(zip(SHARDS, whole))
    header_size = len(whole[0]) - len(parts[0][1])
    for number in range(count):
        kind = number % 8
        if kind < 3:
            changed = packed(damaged_header(parts[0][0], rng), parts[0][1])
            yield f"entry {number}", {SINGLE: changed}
        elif kind < 6:
            yield f"bytes {number}", {SINGLE: damaged_bytes(whole[0], rng, header_size)}
        elif kind == 6:
            yield f"index {number}", {**shards, INDEX: index(damaged_homes(homes, rng))}
        else:
            text = index(homes)
            changed = damaged_bytes(text, rng, len(text))
            yield f"index bytes {number}", {**shards, INDEX: changed}


# --------------------------------------------------------------------------------------- campaign


def run(folder: Path, files: dict[str, bytes]) -> str:
    """Read all tensors and compare with the package; return the outcome in a word."""
    try:
        file = Safetensors(folder)
    except ModelFileError as error:
        if not str(error) or "\n" in str(error) or len(str(error)) > 1000:
            raise AssertionError(f"not one clear line: {error}") from error
        return "ModelFileError"
    wanted = {
        name: (entry["dtype"].lower(), tuple(entry["shape"]), bytes(entry["data"]))
        for shard, content in files.items()
        if shard != INDEX
        for name, entry in safetensors.deserialize(content)
    }
    with file:
        assert file.tensors.keys() == wanted.keys()
        for name, info in file.tensors.items():
            kind, shape, data = wanted[name]
            assert (info.dtype.name, info.shape, info.nbytes) == (kind, shape, len(data))
            assert not info.supported or file.raw(name).tobytes() == data
    return "ran"


def main() -> None:
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    header, data = entries(0)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    signal.signal(signal.SIGPROF, _raise_time_limit)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong, slowest = 0, 0.0
    intact = ("intact", {SINGLE: packed(header, data)})
    for name, files in itertools.chain([intact], large(), cases(count, seed)):
        for old in folder.iterdir():
            old.unlink()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            outcomes[run(folder, files)] += 1
        except (Exception, TimeLimitReached) as error:
            wrong += 1
            print(f"--- {name}: {type(error).__name__}: {error}", file=sys.stderr)
            print("".join(traceback.format_exc().splitlines(True)[-7:]), file=sys.stderr)
            print({file: content[:300] for file, content in files.items()}, file=sys.stderr)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - start)
    print(json.dumps({"outcomes": outcomes, "wrong": wrong, "slowest": slowest}))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
