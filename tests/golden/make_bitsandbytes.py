"""Write bitsandbytes_nf4.npz: the tensors of two linears that bitsandbytes quantised, and what it
makes of them. Needs torch and bitsandbytes (0.50.2 wrote the file).

The rows are multiples of 64 elements: the CPU backend of this version dequantises others wrongly.
"""

from pathlib import Path

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise
from bitsandbytes.nn import Linear4bit

KINDS = (("plain", False, (6, 64)), ("nested", True, (20, 832)))  # 832: more than 256 blocks
ROWS = 6  # that are stored dequantised


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, np.ndarray] = {}
    for name, nested, (rows, columns) in KINDS:
        weight = torch.randn(rows, columns) * 0.05 * torch.exp(torch.randn(rows, 1))
        weight[1, :64] = 0
        linear = Linear4bit(columns, rows, bias=False, compress_statistics=nested, quant_type="nf4")
        linear.load_state_dict({"weight": weight})
        linear = linear.to("cpu")
        found |= {f"{name}.{key}": each.numpy() for key, each in linear.state_dict().items()}
        state = linear.weight.quant_state
        found[f"{name}_rows"] = dequantize_4bit(linear.weight.data, state).numpy()[:ROWS]
        found[f"{name}_absmax"] = state.absmax.numpy()
        if nested:
            absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
            found[f"{name}_absmax"] = absmax.numpy()
    np.savez_compressed(Path(__file__).parent / "bitsandbytes_nf4.npz", **found)


if __name__ == "__main__":
    main()
