"""Independent formulas for every op: plain loops in float64, written from the papers and formats.

They share no code with the bodies that they check; each takes the body's operands and attributes.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

import gguf
import numpy as np
from quantise_oracle import NF4
from quantise_oracle import quantise as quantise_blocks

from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import DTYPES, DType

F32 = np.float32


def values(w: Any) -> np.ndarray:
    """What a weight or an activation stands for, float64; block formats by the gguf package."""
    if not isinstance(w, Blocks):
        return w.astype(np.float64)
    if w.dtype.name in PLANES:
        return plane_values(w)
    if not len(w):
        return np.zeros(w.shape)
    return dequantised_blocks(w.raw, w.dtype)


def dequantised_blocks(raw: np.ndarray, form: DType) -> np.ndarray:
    """Blocks, uint8 [..., row_bytes], as float64 [..., K], by the gguf package where it can."""
    raw = np.ascontiguousarray(raw)
    if form.name != "nf4":
        kind = gguf.GGMLQuantizationType[form.name.upper()]
        return gguf.quants.dequantize(raw, kind).astype(np.float64)
    blocks = raw.reshape(-1, form.nbytes)
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=-1)
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float64)
    return (np.array(NF4)[codes] * d).reshape(*raw.shape[:-1], -1)


# Formats whose rows are q, then float32 scales: the code of q ("f": e4m3), elements per scale (0:
# the row), elements per sum and its code, and what the bytes of a row are a multiple of.
PLANES = {
    "a8_32": ("b", 32, 32, "i", 1), "a8_256": ("b", 256, 16, "h", 1),
    "a8_row": ("b", 0, 0, "i", 32), "f8_row": ("f", 0, 0, "", 32), "f8_128": ("f", 128, 0, "", 32),
    "w8a8": ("b", 0, 0, "", 1), "fp8": ("f", 0, 0, "", 1), "fp8_128": ("f", 128, 0, "", 1),
}  # fmt: skip


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point, table 1: 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return sign * size


_BYTES = {e4m3(byte): byte for byte in range(127)}


def nearest_e4m3(v: float) -> int:
    """The byte of the nearest number, ties to an even mantissa, at most 448."""
    step = 2.0 ** (max(math.frexp(v)[1], -5) - 4)
    byte = _BYTES[min(448.0, round(abs(v) / step) * step)]
    return byte | (128 if math.copysign(1, v) < 0 else 0)


def plane_values(x: Blocks) -> np.ndarray:
    """float32(d * q), read from the bytes one row at a time."""
    code, block = PLANES[x.dtype.name][:2]
    result, block = np.zeros(x.shape), block or max(1, x.elements)
    for t in np.ndindex(x.shape[:-1]):
        data = x.raw[t].tobytes()
        q = struct.unpack_from(f"<{x.elements}{'B' if code == 'f' else code}", data)
        d = struct.unpack_from(f"<{x.elements // block}f", data, x.elements)
        for i, value in enumerate(q):
            number = e4m3(value) if code == "f" else value
            result[t][i] = F32(d[i // block]) * F32(number)
    return result


def each(formula):
    """An oracle that applies a formula of one number."""

    def oracle(x, **attrs):
        flat = [formula(float(v), **attrs) for v in x.ravel()]
        return np.array(flat, np.float64).reshape(x.shape)

    return oracle


def _silu(x):
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def _sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _gelu(x, kind):
    if kind == "erf":
        return x * 0.5 * math.erfc(-x / math.sqrt(2))
    inside = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + math.exp(-2 * inside)) if inside > -300 else 0.0  # (1 + tanh a) / 2


def layer_norm(x, w, b, eps):
    y = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        row = x[index].astype(np.float64)
        y[index] = (row - row.mean()) / math.sqrt(row.var() + eps) * w
        if b is not None:
            y[index] += b
    return y


def softmax(x):
    y = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        weights = [math.exp(float(v) - float(x[index].max())) for v in x[index]]
        y[index] = np.array(weights) / math.fsum(weights)
    return y


def rms_norm(x, w, eps):
    x = x.astype(np.float64)
    result = np.empty_like(x)
    for at in np.ndindex(x.shape[:-1]):
        mean = math.fsum(v * v for v in x[at]) / x.shape[-1]
        result[at] = [v * float(g) / math.sqrt(mean + eps) for v, g in zip(x[at], w, strict=True)]
    return result


def rope(x, pos, factors, base, dims, style, scale, attention_factor):
    """Each pair as a complex number times m e^(i angle); the angle itself is float32's."""
    dims = dims or x.shape[-1]
    result = x.astype(np.float64)
    for t, i in np.ndindex(x.shape[0], dims // 2):
        frequency = F32(float(base) ** (-2 * i / dims)) * F32(scale)
        if factors is not None:
            frequency = frequency / factors[i]
        angle = float(F32(pos[t]) * frequency)
        a, b = (i, i + dims // 2) if style == "half" else (2 * i, 2 * i + 1)
        for h in range(x.shape[1]):
            turn = complex(math.cos(angle), math.sin(angle)) * float(F32(attention_factor))
            z = complex(x[t, h, a], x[t, h, b]) * turn
            result[t, h, a], result[t, h, b] = z.real, z.imag
    return result


def positions_2d(pos, q_start, prefix_len, part):
    """ChatGLM-6B: a prompt of C tokens counts 0..C-1 and then stays; what follows counts 1, 2.."""
    result = []
    for s, count in enumerate(map(int, prefix_len)):
        for p in map(int, pos[q_start[s] : q_start[s + 1]]):
            within = not count or p < count
            result.append((p if within else count - 1, 0 if within else p - count + 1)[part])
    return np.array(result, np.int32)


def sinusoids(pos, width, offset=0):
    """fairseq's SinusoidalPositionalEmbedding; the angle itself is float32's."""
    half = width // 2
    result = np.zeros((len(pos), width))
    for t, i in np.ndindex(len(pos), half):
        angle = float(F32(int(pos[t]) + offset) * F32(math.exp(-math.log(10000) * i / (half - 1))))
        result[t, i], result[t, half + i] = math.sin(angle), math.cos(angle)
    return result


def concat(a, b):
    result = np.empty((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.dtype)
    for at in np.ndindex(result.shape):
        last = at[-1] - a.shape[-1]
        result[at] = a[at] if last < 0 else b[(*at[:-1], last)]
    return result


def attention(
    q, k, v, q_start, kv_len, table, sinks, slopes, prefix_len, position_bias,
    scale, block, causal=True, window=0, softcap=0.0, skip_prefix=False,
):  # fmt: skip
    if isinstance(k, Blocks):
        k = values(k).reshape(len(k), -1, q.shape[2])
        v = values(v).reshape(len(v), k.shape[1], -1)
    result = np.zeros((*q.shape[:2], v.shape[2]))
    share = q.shape[1] // k.shape[1]
    for s, length in enumerate(map(int, kv_len)):
        count = int(q_start[s + 1] - q_start[s])
        prefix = int(prefix_len[s]) if prefix_len is not None else 0
        for i in range(count):
            p = length - count + i
            first = prefix if skip_prefix else 0
            seen = [j for j in range(first, length) if _sees(p, j, causal, window, prefix)]
            rows = [int(table[s, j // block]) * block + j % block for j in seen]
            for h in range(q.shape[1]):
                logits = []
                for j, row in zip(seen, rows, strict=True):
                    query = q[q_start[s] + i, h].astype(np.float64)
                    z = float(query @ k[row, h // share].astype(np.float64)) * scale
                    z = softcap * math.tanh(z / softcap) if softcap else z
                    z += float(slopes[h]) * (j - p) if slopes is not None else 0
                    logits.append(z + _position_bias(position_bias, h, j - p))
                sink = float(sinks[h]) if sinks is not None else -math.inf
                result[q_start[s] + i, h] = _mix(logits, sink, v[rows, h // share])
    return result


def _position_bias(table, head, distance):
    """The bias of a key so far behind the query; at the ends of the table that of all further."""
    if table is None:
        return 0.0
    middle = (table.shape[1] - 1) // 2
    return float(table[head, min(max(middle + distance, 0), 2 * middle)])


def packed_attention(q, k, v, q_start, position_bias=None, *, scale, window=0):
    """Query by query, in float64."""
    result = np.zeros((*q.shape[:2], v.shape[2]))
    share = q.shape[1] // k.shape[1]
    for t, h in np.ndindex(q.shape[:2]):
        s = int(np.searchsorted(q_start, t, "right")) - 1  # empty sequences come before t's
        first, end = int(q_start[s]), int(q_start[s + 1])
        own = (
            slice(max(first, t - window), min(end, t + window + 1)) if window else slice(first, end)
        )
        logits = k[own, h // share].astype(np.float64) @ q[t, h].astype(np.float64) * scale
        biases = (_position_bias(position_bias, h, j - t) for j in range(own.start, own.stop))
        logits = [z + bias for z, bias in zip(logits, biases, strict=True)]
        result[t, h] = _mix(logits, -math.inf, v[own, h // share])
    return result


def pool(x, q_start, *, kind):
    """Sequence by sequence and element by element, in float64."""
    result = np.zeros((len(q_start), x.shape[1]))
    for s, d in np.ndindex(len(q_start) - 1, x.shape[1]):
        own = [float(v) for v in x[q_start[s] : q_start[s + 1], d]]
        if not own:
            continue
        weighted = math.fsum(i * v for i, v in enumerate(own, 1)) / math.fsum(range(len(own) + 1))
        result[s, d] = {
            "cls": own[0], "lasttoken": own[-1], "max": max(own), "weightedmean": weighted,
            "mean": math.fsum(own) / len(own),
            "mean_sqrt_len_tokens": math.fsum(own) / math.sqrt(len(own)),
        }[kind]  # fmt: skip
    return result


def rebuild_padding(x, q_start, *, length):
    """Row by row, as lists."""
    blank = np.zeros(x.shape[1:]).tolist()
    parts = [x[a:b].tolist() for a, b in zip(q_start, [*q_start[1:], q_start[-1]])]
    padded = [rows + [blank] * (length - len(rows)) for rows in parts]
    return np.array(padded).reshape(len(q_start), length, *x.shape[1:])


def remove_padding(x, q_start, tokens):
    """Row by row, as lists."""
    counts = np.diff(q_start).tolist()
    rows = [x[s, p].tolist() for s, count in enumerate(counts) for p in range(count)]
    return np.array(rows).reshape(len(tokens), *x.shape[2:])


def _sees(p, j, causal, window, prefix):
    future = j > p and not (j < prefix and p < prefix)
    return not (causal and future) and not (window and p - j >= window)


def _mix(logits, sink, rows):
    if not logits:
        return 0.0
    top = max(*logits, sink)
    weights = [math.exp(z - top) for z in logits]
    total = math.fsum([*weights, math.exp(sink - top)])
    return np.array(weights) @ rows.astype(np.float64) / total


def kv_write(pool, x, slot):
    for t, row in enumerate(slot):
        if row >= 0 and isinstance(pool, Blocks) and pool.dtype.name == "fp8":
            k = pool.elements
            raw = quantise_act(x[t], "f8_row").raw  # e4m3, the scale, zeros
            pool.raw[row] = raw[:, : k + 4]
        elif row >= 0 and isinstance(pool, Blocks):
            encode = {"q8_0": _q8_0, "q4_0": _q4_0}[pool.dtype.name]
            data = b"".join(map(encode, x[t].reshape(-1, 32)))
            pool.raw[row] = np.frombuffer(data, np.uint8).reshape(pool.raw.shape[1:])
        elif row >= 0:
            for at in np.ndindex(x.shape[1:]):
                pool[(row, *at)] = half(float(x[(t, *at)])) if pool.itemsize == 2 else x[(t, *at)]
    return pool


def copy_blocks(pool, source, target, block):
    rows = pool.raw if isinstance(pool, Blocks) else pool
    for old, new in zip(source, target):
        for i in range(block):
            if old >= 0 and new >= 0:
                rows[new * block + i] = rows[old * block + i]
    return pool


def _q8_0(block) -> bytes:
    """d = amax / 127 as float16, then each x / d to the nearest integer, halves away from zero."""
    amax = max(map(abs, block))
    if not all(map(np.isfinite, block)):
        return struct.pack("<e32b", math.nan, *[0] * 32)
    if amax < 2.0**-100:
        return bytes(34)
    d = amax / F32(127)
    steps = [float(x * (F32(1) / d)) for x in block]
    q = [int(math.copysign(math.floor(F32(abs(s)) + F32(0.5)), s)) for s in steps]
    return struct.pack("<e32b", half(float(d)), *q)


def _q4_0(block) -> bytes:
    """d = the element of largest magnitude / -8, then x / d + 8 to the nearest of 0 to 15."""
    if not all(map(np.isfinite, block)):
        return struct.pack("<e16B", math.nan, *[0x88] * 16)
    most = max(block, key=abs)
    if abs(most) < 2.0**-100:
        return struct.pack("<e16B", -0.0, *[0x88] * 16)
    d = most / F32(-8)
    q = [min(15, int(F32(x * (F32(1) / d)) + F32(8.5))) for x in block]
    return struct.pack("<e16B", half(float(d)), *(low | high << 4 for low, high in zip(q, q[16:])))


def half(x: float) -> float:
    """The nearest float16, by Python's own struct."""
    try:
        return struct.unpack("<e", struct.pack("<e", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def brain(x: float) -> float:
    """The nearest bfloat16: the float32's upper half, rounded to even."""
    with np.errstate(over="ignore"):
        bits = int(F32(x).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1) if math.isfinite(x) else 0
    return float(np.uint32(bits & 0xFFFF0000).view(F32))


def cast(x, dtype):
    rounded = {"f16": half, "bf16": brain, "f32": float}[dtype]
    return np.array([rounded(float(v)) for v in x.ravel()], np.float64).reshape(x.shape)


def gather_rows(x, rows):
    return np.array([x[int(r)].tolist() for r in rows], x.dtype).reshape(len(rows), *x.shape[1:])


def gather_columns(x, columns):
    return np.array([[row[int(c)] for c in columns] for row in x], x.dtype).reshape(x.shape)


def embedding(ids, w):
    every = values(w)
    return np.array([every[int(i)] for i in ids]).reshape(len(ids), w.shape[1])


def linear(x, w, bias):
    result = np.einsum("tk,nk->tn", values(x), values(w))
    return result if bias is None else result + bias


def quantise_act(x, dtype):
    """The bytes of each row, from the format's definition."""
    k = x.shape[-1]
    kind, block, per_sum, code, align = PLANES[dtype]
    block, per_sum, most = block or k, per_sum or k, 448 if kind == "f" else 127
    most = 127.5 if dtype in ("a8_row", "w8a8") else most
    rows = []
    for row in x.reshape(-1, k):
        q, d = [], []
        for start in range(0, k, block):
            part = row[start : start + block]
            amax = max((abs(v) for v in part), default=F32(0))
            if not all(np.isfinite(v) for v in part):
                d, q = [*d, F32(np.nan)], q + [0] * block
            elif amax < 2.0**-100:
                d, q = [*d, F32(0)], q + [0] * block
            else:
                inverse = F32(most) / amax
                d.append(amax / F32(most))
                if kind == "f":
                    q += [nearest_e4m3(float(v * inverse)) for v in part]
                else:
                    q += [max(-127, min(127, round(float(v * inverse)))) for v in part]
        data = struct.pack(f"<{k}{'B' if kind == 'f' else kind}{len(d)}f", *q, *d)
        if code:
            sums = [sum(q[i : i + per_sum]) for i in range(0, k, per_sum)]
            data += struct.pack(f"<{len(sums)}{code}", *sums)
        rows.append(data + bytes(-len(data) % align))
    width = len(rows[0]) if rows else DTYPES[dtype].row_nbytes(k)
    raw = np.frombuffer(b"".join(rows), np.uint8).reshape(*x.shape[:-1], width)
    return Blocks(raw, DTYPES[dtype], k)


def quantise(x, dtype):
    return quantise_act(x.astype(F32), dtype) if dtype in PLANES else quantise_blocks(x, dtype)


def head_linear(x, w):
    return np.einsum("thk,hnk->thn", values(x), values(w))


def top_k(x, bias, k, groups=1, top_groups=1, top_per_group=1):
    """By Python's sort, which is stable, on (is no NaN, -value)."""

    def order(values):
        return sorted(range(len(values)), key=lambda i: (values[i] == values[i], -values[i]))

    result = []
    for row in x if bias is None else x + bias:
        size = len(row) // groups
        worth = []
        for g in range(groups):
            own = row[g * size : (g + 1) * size]
            total = F32(-0.0)
            with np.errstate(invalid="ignore"):
                for i in order(own.tolist())[:top_per_group]:
                    total += own[i]
            worth.append(float(total))
        allowed = set(order(worth)[:top_groups])
        result.append([i for i in order(row.tolist()) if i // size in allowed][:k])
    return np.array(result, np.int32).reshape(len(x), k)


def pick(x, ids):
    return np.array([[x[t, i] for i in row] for t, row in enumerate(ids)]).reshape(ids.shape)


def sum_norm(x, eps):
    totals = [math.fsum(map(float, row)) + float(F32(eps)) for row in x]
    return np.array([row.astype(np.float64) / s for row, s in zip(x, totals, strict=True)]).reshape(
        x.shape
    )


def expert_linear(x, w, ids, bias):
    x, w = values(x), values(w)
    result = np.empty((*ids.shape, w.shape[1]))
    for t, j in np.ndindex(ids.shape):
        own = x[t] if x.ndim == 2 else x[t, j]
        result[t, j] = w[ids[t, j]] @ own + (0 if bias is None else bias[ids[t, j]])
    return result


def combine(y, weights):
    result = np.zeros((y.shape[0], y.shape[2]))
    for t, j in np.ndindex(weights.shape):
        result[t] += float(weights[t, j]) * y[t, j].astype(np.float64)
    return result


def clamped_glu(gate, up, alpha, limit):
    result = np.empty(gate.shape)
    for at in np.ndindex(gate.shape):
        g, u = min(float(gate[at]), limit), max(-limit, min(limit, float(up[at])))
        result[at] = g * _sigmoid(alpha * g) * (u + 1)
    return result


def argmax(x):
    result = []
    for row in x:
        best = 0
        for i, v in enumerate(map(float, row)):
            if v > float(row[best]) or (math.isnan(row[best]) and not math.isnan(v)):
                best = i
        result.append(best)
    return np.array(result, np.int32)


def philox(counter, key):
    """Random123's Philox4x32-10 on Python integers, as the paper's figure states it."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = p1 >> 32 ^ b ^ k0, p1 % 2**32, p0 >> 32 ^ d ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def masked_ids(mask, n, width):
    """The ids that a row of a bitmap excludes, a bit at a time."""
    if mask is None:
        return set()
    return {i for i in range(width) if not int(mask[n][i // 32]) >> i % 32 & 1}


def sample(logits, temperature, top_k, top_p, min_p, seed, count, sample_index, mask=None):
    result = []
    for n, row in enumerate(logits.astype(np.float64).tolist()):
        for token in masked_ids(mask, n, len(row)):
            row[token] = -math.inf
        if any(math.isnan(x) or x == math.inf for x in row) or max(row) == -math.inf:
            result.append(-1)
            continue
        left = sorted(range(len(row)), key=lambda i: (-row[i], i))
        if temperature[n] <= 0:
            result.append(left[0])
            continue
        if top_k[n] > 0:
            left = left[: top_k[n]]
        if top_p[n] < 1:
            total, reached, kept = sum(math.exp(row[i] - row[left[0]]) for i in left), 0.0, []
            for i in left:
                kept.append(i)
                reached += math.exp(row[i] - row[left[0]])
                if reached >= float(top_p[n]) * total:
                    break
            left = kept
        most = row[left[0]]
        left = sorted(i for i in left if math.exp(row[i] - most) >= float(min_p[n]))
        key = int(seed[n]) % 2**32, int(seed[n]) >> 32 & 0xFFFFFFFF
        best, chosen = -math.inf, -1
        for i in left:
            counter = i // 4, int(count[n]), int(sample_index[n]), 0
            u = (philox(counter, key)[i % 4] + 0.5) / 2**32
            score = (row[i] - most) / float(temperature[n]) - math.log(-math.log(u))
            if score > best:
                best, chosen = score, i
        result.append(chosen)
    return np.array(result, np.int32)


def bias_logits(logits, ids, bias, allowed, stop, count, min_tokens, mask=None):
    result = logits.astype(np.float64)
    for n, row in enumerate(result):
        for token, value in zip(map(int, ids[n]), map(float, bias[n])):
            if 0 <= token < len(row):
                row[token] = math.nan if row[token] == -value == math.inf else row[token] + value
        only = {token for token in map(int, allowed[n]) if 0 <= token < len(row)}
        excluded = set(range(len(row))) - only if only else set()
        if count[n] < min_tokens[n]:
            excluded |= {token for token in map(int, stop[n]) if 0 <= token < len(row)}
        for token in excluded | masked_ids(mask, n, len(row)):
            row[token] = -math.inf if row[token] < math.inf else math.nan
    return result


def penalise(logits, history, length, breakers, factors, windows):
    """The three penalties as llama.cpp's documentation states them, an id at a time; then DRY."""
    result, width = logits.astype(np.float64), history.shape[1]
    for n, row in enumerate(result):
        repeat, presence, frequency, multiplier, base = map(float, factors[n])
        last_n, least, dry_last_n = map(int, windows[n])
        kept = [int(history[n][p % width]) for p in range(max(0, length[n] - width), length[n])]
        for token, times in Counter(kept[-last_n:] if last_n > 0 else kept * (last_n < 0)).items():
            if 0 <= token < len(row):
                row[token] *= 1 / repeat if row[token] > 0 else repeat
                row[token] -= presence + times * frequency
        past = kept[-dry_last_n:] if dry_last_n > 0 else kept * (dry_last_n < 0)
        repeated = dry_repetitions(past, set(map(int, breakers[n])), least)
        for token, most in repeated.items():
            if multiplier and base >= 1 and 0 <= token < len(row):
                power = min((most - least) * math.log(base), 127 * math.log(2))
                row[token] -= min(multiplier * math.exp(power), 3.4e38)
    return result


def dry_repetitions(past, breakers, least):
    """Longest suffix of ``past`` (oldest first) that each token followed before, by definition."""
    free = next((i for i, token in enumerate(reversed(past)) if token in breakers and token >= 0),
                len(past))  # fmt: skip
    found = {}
    for at in range(1, len(past)):  # past[at] followed past[:at]
        same = 0
        while same < min(at, free) and past[at - 1 - same] == past[-1 - same]:
            same += 1
        if free >= least and same >= least:
            found[past[at]] = max(found.get(past[at], 0), same)
    return found


def filter_logits(logits, settings, top_k, seed, count, sample_index):
    result = np.full(logits.shape, -math.inf)
    for n, row in enumerate(logits.astype(np.float64)):
        if np.isnan(row).any() or not math.isfinite(row.max()):
            result[n] = row
            continue
        sigmas, typical, top_p, min_p, xtc, threshold = map(float, settings[n])
        left = sorted(range(len(row)), key=lambda i: (-row[i], i))
        if sigmas > 0:
            finite = [x for x in row.tolist() if x > -math.inf]
            mean = math.fsum(finite) / len(finite)
            sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
            left = [i for i in left if row[i] >= row.max() - sigmas * sigma]
        left = left[: top_k[n]] if top_k[n] > 0 else left
        if typical < 1:
            p = _softmax(row[left])
            entropy = math.fsum(-x * math.log(x) for x in p if x > 0)
            gap = {i: abs(F32(-math.log(x) - entropy)) if x > 0 else math.inf
                   for i, x in zip(left, p)}  # fmt: skip
            order = sorted(left, key=lambda i: (gap[i], i))
            left = _until(order, dict(zip(left, p)), typical)
            left.sort(key=lambda i: (-row[i], i))
        if top_p < 1:
            left = _until(left, dict(zip(left, _softmax(row[left]))), top_p)
        left = [i for i in left if math.exp(row[i] - row[left[0]]) >= min_p]
        key = int(seed[n]) % 2**32, int(seed[n]) >> 32 & 0xFFFFFFFF
        word = philox((0, int(count[n]), int(sample_index[n]), 1), key)[0]
        if (word + 0.5) / 2**32 < xtc and threshold <= 0.5:
            p = _softmax(row[left])
            above = sum(x >= threshold and row[i] > -math.inf for x, i in zip(p, left))
            left = left[max(0, above - 1) :]
        result[n][left] = row[left]
    return result


def _softmax(x):
    top = max(x)
    weight = [math.exp(v - top) for v in x]
    total = math.fsum(weight)
    return [w / total for w in weight]


def _until(order, p, share):
    """The first ids of ``order`` whose probabilities reach a share."""
    total = 0.0
    for at, i in enumerate(order):
        total += p[i]
        if total >= share:
            return order[: at + 1]
    return order


def top_ids(logits, *, n):
    return np.array([sorted(range(len(row)), key=lambda i: (not math.isnan(row[i]),
                     -row[i] if not math.isnan(row[i]) else 0, i))[:n] for row in logits.tolist()],
                    np.int32).reshape(len(logits), n)  # fmt: skip


def logprobs(logits, ids, biased=None):
    result = np.full(ids.shape, math.nan)
    listed = logits if biased is None else biased
    for n, (row, own) in enumerate(zip(logits.astype(np.float64).tolist(), listed.tolist())):
        most = max(row)
        if any(math.isnan(x) for x in row) or not math.isfinite(most):
            continue
        total = most + math.log(math.fsum(math.exp(x - most) for x in row))
        for a, i in enumerate(ids[n].tolist()):
            if 0 <= i < len(row):
                result[n, a] = own[i] - total
    return result


def advance(sampled, ids, pos, kv_len, count, history, *groups, block):
    for s in range(len(kv_len)):
        p = int(kv_len[s])
        history[s, p % history.shape[1]] = sampled[s]
        ids[s], pos[s], kv_len[s], count[s] = sampled[s], p, p + 1, count[s] + 1
        for g in range(0, len(groups), 2):
            slot, table = groups[g], groups[g + 1]
            inside = p // block < table.shape[1] and table[s, p // block] >= 0
            slot[s] = table[s, p // block] * block + p % block if inside else -1
    return ids


def accept_drafts(sampled, drafts, tokens, progress):
    """Token by token, and the prediction from all suffixes, the longest first."""
    known = tokens[: progress[0]].tolist()
    for r, token in enumerate(sampled[: len(drafts) + 1].tolist()):
        if len(known) < len(tokens):
            known.append(token)
        if r < len(drafts) and (drafts[r] < 0 or drafts[r] != token):
            break
    tokens[: len(known)], progress[0] = known, len(known)
    drafts[:] = -1
    for length in range(32, 1, -1):
        own = known[-length:]
        places = [at for at in range(length, len(known)) if known[at - length : at] == own]
        if places:
            for i in range(len(drafts)):
                drafts[i] = known[places[-1] + i] if places[-1] + i < len(known) else drafts[
                    i - (len(known) - places[-1])]  # fmt: skip
            break
    return drafts


def place_drafts(progress, drafts, tokens, ids, pos, kv_len, count, *groups, block):
    for r in range(len(kv_len)):
        p = int(progress[0]) - 1 + r
        drafted = 0 < r <= len(drafts) and drafts[r - 1] >= 0
        ids[r] = drafts[r - 1] if drafted else tokens[progress[0] - 1]
        pos[r], kv_len[r], count[r] = p, p + 1, p + 1 - progress[1]
        for slot, table in zip(groups[::2], groups[1::2]):
            inside = p // block < table.shape[1] and table[r, p // block] >= 0
            slot[r] = table[r, p // block] * block + p % block if inside else -1
    return ids


def hadamard(x):
    """Sylvester's recursion for blocks of 16, in float32."""

    def transform(rows):
        if rows.shape[1] == 1:
            return rows
        low, high = map(transform, np.hsplit(rows, 2))
        return np.hstack((low + high, low - high))

    return (transform(x.reshape(-1, 16)) * F32(0.25)).reshape(x.shape)


def same(x, memory=None):
    return np.array(x.tolist(), x.dtype).reshape(x.shape)


ORACLES = {
    "hadamard": hadamard,
    "add": lambda a, b: a.astype(np.float64) + b,
    "mul": lambda a, b: a.astype(np.float64) * b,
    "scale": each(lambda x, factor: x * float(F32(factor))),
    "silu": each(_silu),
    "relu": each(lambda x: max(x, 0.0)),
    "sigmoid": each(_sigmoid),
    "clamped_glu": clamped_glu,
    "gelu": each(_gelu),
    "softcap": each(lambda x, cap: cap * math.tanh(x / cap)),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "softmax": softmax,
    "rope": rope,
    "positions_2d": positions_2d,
    "sinusoids": sinusoids,
    "concat": concat,
    "attention": attention,
    "packed_attention": packed_attention,
    "pool": pool,
    "rebuild_padding": rebuild_padding,
    "remove_padding": remove_padding,
    "kv_write": kv_write,
    "copy_blocks": copy_blocks,
    "cast": cast,
    "contiguous": same,
    "copy": same,
    "host_call": lambda x, call: 0.0 - x,  # the samples' functions change the sign
    "gather_rows": gather_rows,
    "gather_columns": gather_columns,
    "embedding": embedding,
    "linear": linear,
    "head_linear": head_linear,
    "top_k": top_k,
    "pick": pick,
    "sum_norm": sum_norm,
    "expert_linear": expert_linear,
    "combine": combine,
    "quantise_act": quantise_act,
    "quantise": quantise,
    "argmax": argmax,
    "sample": sample,
    "penalise": penalise,
    "bias_logits": bias_logits,
    "filter_logits": filter_logits,
    "top_ids": top_ids,
    "logprobs": logprobs,
    "advance": advance,
    "accept_drafts": accept_drafts,
    "place_drafts": place_drafts,
}
