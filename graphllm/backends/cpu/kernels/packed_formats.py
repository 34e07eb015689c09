"""Weight formats in R16 form, as microkernels read them.

R16 holds 16 rows of a matrix together, in the bytes of GGUF's blocks (source of the formats: ggml,
`ggml-common.h`), cut into chunks of four: a vector is one chunk of 16 rows, so lane = row, each
activation is one broadcast and no sum crosses lanes. A group of 16 rows follows the other; within
it, block follows block. Per block of 16 rows:

    q8_0   8 vectors of int8; 16 d
    q4_0   4 vectors of nibbles (low: elements 0..15, high: 16..31); 16 d
    q5_0   4 vectors of nibbles; 1 of fifth bits; 16 d
    q4_1   as q4_0, and 16 m at the end
    q5_1   as q5_0, and 16 m at the end
    iq4_nl as q4_0
    mxfp4  4 vectors of nibbles; 16 bytes of exponents
    q4_k   16 d; 16 dmin; 3 vectors of scales; 32 of nibbles
    q5_k   16 d; 16 dmin; 3 vectors of scales; 8 of fifth bits; 32 of nibbles
    q2_k   16 vectors of bit pairs; 4 of scales (low halves) and minima; 16 d; 16 dmin
    q3_k   8 vectors of third bits; 16 of bit pairs; 3 of scales; 16 d
    q6_k   16 times (half h, chunk j): top bits, low nibbles of runs 0 and 2, of runs 1 and 3;
           4 vectors of scales; 16 d
    iq4_xs 16 d; 16 times the scales' top bits; 1 vector of scales' low halves; 32 of nibbles
    f32, f16, bf16   16 elements, for each k

Two things are moved so that they unpack in few steps: bit 8 b + j of q5_0's and q5_1's fifth bits
belongs to element 4 j + b, and bytes of scales of 16 sub-blocks (q2_k, q3_k, q6_k) are stored
0 2 1 3 in each four. `layouts.py` packs.
"""

from __future__ import annotations

from typing import Any

from ....formats.iq4 import IQ4_VALUES
from ....formats.mxfp4 import MXFP4_VALUES
from .block_unpacking import Block32, BlockK, Codes, Format, Plain
from .block_unpacking_32 import Q8, Coded, Mx, Nibbles
from .block_unpacking_k import IQ4XS, Q2K, Q3K, Q4K, Q5K, Q6K

_IQ4, _MXFP4 = Codes(IQ4_VALUES), Codes(MXFP4_VALUES)

FORMATS: dict[str, Any] = {
    f.name: f
    for f in (
        Plain("f32", 0, 1, 64, "load_f32"),
        Plain("f16", 1, 1, 32, "load_f16"),
        Plain("bf16", 2, 1, 32, "load_bf16"),
        Q8("q8_0", 3, 32, 16 * 34, 255),
        Nibbles("q5_0", 4, 32, 16 * 22, 31),
        Q4K("q4_k", 5, 256, 16 * 144, 32, 15),
        Q6K("q6_k", 6, 256, 16 * 210, 16, 63),
        Nibbles("q4_0", 7, 32, 16 * 18, 15),
        Nibbles("q4_1", 8, 32, 16 * 20, 15, True),
        Nibbles("q5_1", 9, 32, 16 * 24, 31, True),
        Q5K("q5_k", 10, 256, 16 * 176, 32, 31),
        Q2K("q2_k", 11, 256, 16 * 84, 16, 3),
        Q3K("q3_k", 12, 256, 16 * 110, 16, 7),
        Coded("iq4_nl", 13, 32, 16 * 18, _IQ4.largest, codes=_IQ4),
        IQ4XS("iq4_xs", 14, 256, 16 * 136, 32, _IQ4.largest, _IQ4),
        Mx("mxfp4", 15, 32, 16 * 17, _MXFP4.largest, codes=_MXFP4),
    )
}
BY_CODE: dict[int, Any] = {f.code: f for f in FORMATS.values()}

__all__ = ["BY_CODE", "FORMATS", "Block32", "BlockK", "Format"]
