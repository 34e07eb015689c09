"""What a step reads and where it caches: the inputs of a decoder's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..graph.tensor import Var, feed, state


@dataclass(frozen=True)
class CacheSpec:
    """Layers that cache alike: shapes of what one token adds, and how far back they look (0: all).

    Each has slots and a block table of its own; with a window, only as many as `Limits.kept` says.
    """

    name: str
    layers: tuple[int, ...]
    entries: Mapping[str, tuple[int, ...]]
    window: int = 0


@dataclass(frozen=True)
class Limits:
    """The largest step and cache that a graph is built for."""

    tokens: int = 512  # T: tokens of one step
    sequences: int = 1  # S
    context: int = 4096  # tokens of one sequence
    block: int = 64  # tokens of one entry of a block table
    kv_dtype: str = "f16"
    stops: int = 32  # ids that end a sequence
    history: int = 64  # tokens that penalties look back on

    def within(self, context: int) -> Limits:
        """With sequences of ``context`` tokens at most: no model is run beyond its own."""
        length = min(self.context, context)
        return replace(self, context=length, tokens=min(self.tokens, length))

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.context // self.block)

    def kept(self, window: int) -> int:
        """Blocks of one sequence that layers with this window (0: none) keep at a time.

        Those before a step that its first token sees, the step's own, and the next token's.
        """
        if not window:
            return self.blocks
        return min(self.blocks, -(-(window + self.tokens) // self.block) + 1)


class Batch:
    """The inputs of one step: T tokens of S sequences, packed without padding.

    ids, pos [T]; q_start [S + 1]: where each sequence's tokens begin; kv_len [S]: its tokens in the
    cache, this step's included; rows [N]: the tokens whose logits are wanted; and for each cache
    group, slot [T]: where a token's entry goes, and table [S, B]: the blocks of each sequence.
    prefix_len [S]: how many first tokens of a sequence see one another; 0 for most models.
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
        # sampling parameters, one a sequence
        self.temperature = feed("temperature", (s,), "f32")
        self.top_k = feed("top_k", (s,), "i32")
        self.top_p = feed("top_p", (s,), "f32")
        self.min_p = feed("min_p", (s,), "f32")
        self.seed = feed("seed", (s,), "i64")
        self.repeat = feed("repeat", (s,), "f32")
        self.presence = feed("presence", (s,), "f32")
        self.frequency = feed("frequency", (s,), "f32")
        self.min_tokens = feed("min_tokens", (s,), "i32")
