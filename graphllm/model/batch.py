"""Inputs of a decoder's graph: the tokens of one step, its limits, and the KV cache groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..graph.tensor import Var, feed, state


@dataclass(frozen=True)
class CacheSpec:
    """A group of layers with the same KV cache layout, slots and block table.

    Attributes:
        name: Name of the group.
        layers: Indices of its layers.
        entries: Shape of what a layer caches for one token, by the entry's name ("k", "v").
        window: Sliding window in tokens; 0 for none. With a window, a sequence keeps
            `Limits.kept` blocks at a time.
    """

    name: str
    layers: tuple[int, ...]
    entries: Mapping[str, tuple[int, ...]]
    window: int = 0


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of a step and of the KV cache that a graph is built for."""

    tokens: int = 512  # T: tokens of one step
    sequences: int = 1  # S
    context: int = 4096  # tokens of one sequence
    block: int = 64  # tokens of one KV cache block
    kv_dtype: str = "f16"
    stops: int = 32  # stop token ids of a step
    history: int = 64  # last tokens of a sequence that penalties consider

    def within(self, context: int) -> Limits:
        """Return the limits for sequences of at most ``context`` tokens, the model's maximum."""
        length = min(self.context, context)
        return replace(self, context=length, tokens=min(self.tokens, length))

    @property
    def blocks(self) -> int:
        """KV cache blocks of one sequence."""
        return -(-self.context // self.block)

    def kept(self, window: int) -> int:
        """Return the number of blocks of one sequence that a layer keeps at a time.

        With a ``window`` (0: none) these are the blocks that the first token of a step attends to,
        the blocks of the step itself, and the block of the next token.
        """
        if not window:
            return self.blocks
        return min(self.blocks, -(-(window + self.tokens) // self.block) + 1)


class Batch:
    """Graph inputs of one step: T tokens of S sequences, packed without padding.

    Attributes:
        ids, pos: Token ids and positions [T].
        q_start: Index of each sequence's first token in the step, and T [S + 1].
        kv_len: Tokens of each sequence in the cache, including this step's [S].
        rows: Indices of the tokens whose logits are computed [N].
        prefix_len: Length of each sequence's bidirectional prefix [S]; 0 for causal models.
        slot: Cache slot of each token [T], by cache group.
        table: Block table of each sequence [S, B], by cache group.
        count, done, history, stop: State of generation; see `ops.advance`.
        temperature and the following: Sampling parameters of each sequence [S].
    """

    def __init__(self, caches: tuple[CacheSpec, ...], limits: Limits) -> None:
        t, s = Var("T", 1, limits.tokens), Var("S", 1, limits.sequences)
        n, q = Var("N", 1, limits.tokens), Var("Q", 2, limits.sequences + 1)
        self.limits = limits
        self.ids, self.pos = state("ids", (t,), "i32"), state("pos", (t,), "i32")
        self.kv_len, self.q_start = state("kv_len", (s,), "i32"), feed("q_start", (q,), "i32")
        self.rows = feed("rows", (n,), "i32")
        self.prefix_len = feed("prefix_len", (s,), "i32")
        self.slot = {c.name: state(f"slot.{c.name}", (t,), "i32") for c in caches}
        self.table = {c.name: feed(f"table.{c.name}", (s, limits.blocks), "i32") for c in caches}
        self.count, self.done = state("count", (s,), "i32"), state("done", (s,), "i32")
        self.history = state("history", (s, limits.history), "i32")
        self.stop = feed("stop", (limits.stops,), "i32")
        self.temperature = feed("temperature", (s,), "f32")
        self.top_k = feed("top_k", (s,), "i32")
        self.top_p = feed("top_p", (s,), "f32")
        self.min_p = feed("min_p", (s,), "f32")
        self.seed = feed("seed", (s,), "i64")
        self.repeat = feed("repeat", (s,), "f32")
        self.presence = feed("presence", (s,), "f32")
        self.frequency = feed("frequency", (s,), "f32")
        self.min_tokens = feed("min_tokens", (s,), "i32")
