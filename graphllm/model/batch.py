"""Inputs of a model's graph: step variables, limits of a step, and the KV cache groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from ..graph.tensor import Tensor, Var, feed, state

MAX_LOGITS_BYTES = 64 << 20  # upper bound of the logits that a plan without sampling computes

# Prefix of the names of the outputs that encode sources, see `encoder_decoder.EncoderDecoder`.
ENCODED = "encoded."

# Sources of step variables.
FED = "fed"  # written by the host before a step
ADVANCED = "advanced"  # written by the host or, at the end of a decode step, by `ops.advance`

# Owners of the rows of step variables.
TOKEN = "token"  # one row for each of the T tokens of the step
SEQUENCE = "sequence"  # one row for each of the S sequences
ROW = "row"  # one row for each of the N rows of logits
STEP = "step"  # one value for the step


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
    stops: int = 32  # stop token ids of a sequence
    history: int = 1024  # last tokens of a sequence that penalties can consider
    biases: int = 256  # biased and banned token ids of a sequence
    allowed: int = 256  # allowed token ids of a sequence
    breakers: int = 16  # DRY's sequence breakers of a sequence
    top_logprobs: int = 20  # most likely ids whose log-probabilities a step can return
    candidates: int = 64  # most likely ids that a step returns for beam search
    kv_blocks: int = 0  # blocks of KV pools without a window; 0: all sequences at full length
    one_step: bool = False  # the KV cache holds the sequences of a step only, in `kv_blocks`
    drafts: int = 0  # draft tokens of a step, each of which is computed as a sequence of its own

    def within(self, context: int) -> Limits:
        """Return the limits for sequences of at most ``context`` tokens, the model's maximum."""
        length = min(self.context, context)
        return replace(self, context=length, tokens=min(self.tokens, length * self.sequences))

    def plan_tokens(self, count: int) -> int:
        """Return the upper bound of tokens of the plan that runs a step of ``count`` tokens.

        Few tokens are slower in the plan of a long step.
        """
        return min(self.tokens, Limits.tokens) if count <= Limits.tokens else self.tokens

    @property
    def step_sequences(self) -> int:
        """Maximum number of sequences of a step, draft tokens included."""
        return max(self.sequences, min(self.sequences + self.drafts, self.tokens))

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

    def logits_rows(self, vocab: int) -> int:
        """Return the number of rows of logits [N, vocab] that a plan without sampling computes."""
        return max(1, min(self.tokens, MAX_LOGITS_BYTES // (4 * vocab)))

    def pool_blocks(self, window: int) -> int:
        """Return the number of KV cache blocks that all sequences share in a layer.

        A layer with a ``window`` (0: none) has what all sequences keep at a time, at most what a
        step needs if the cache is for one step.
        """
        most = self.sequences * self.kept(window)
        own = self.kv_blocks if self.one_step or not window else 0
        return min(most, own) if own else most


def source_tokens(ids: Iterable[int]) -> list[int]:
    """Return the ids of a source as they are in a sequence (below zero), or the other way round.

    So a sequence of an encoder-decoder states where its source ends and its target begins.
    """
    return [~token for token in ids]


def source_length(tokens: Iterable[int]) -> int:
    """Return the number of tokens of a sequence's source; 0 for a decoder's sequence."""
    return sum(1 for _ in takewhile(lambda token: token < 0, tokens))


@dataclass(frozen=True)
class StepVariable:
    """One input of a step. Graph leaves, feeds and buffers follow from this declaration.

    Attributes:
        name: name of the graph leaf.
        shape: its shape; the first axis is T, S, Q, N or fixed.
        dtype: name of its dtype.
        source: `FED` or `ADVANCED`.
        owner: what each row belongs to: `TOKEN`, `SEQUENCE`, `ROW` or `STEP`.
    """

    name: str
    shape: tuple[Var | int, ...]
    dtype: str
    source: str
    owner: str

    def leaf(self) -> Tensor:
        """Return the graph leaf of the variable."""
        make = state if self.source == ADVANCED else feed
        return make(self.name, self.shape, self.dtype)


def step_vars(limits: Limits) -> tuple[Var, Var, Var, Var]:
    """Return the Vars of a step: T tokens, S sequences, Q = S + 1, N rows of logits."""
    return (
        Var("T", 1, limits.tokens),
        Var("S", 1, limits.step_sequences),
        Var("Q", 2, limits.step_sequences + 1),
        Var("N", 1, limits.tokens),
    )


def forward_variables(caches: Iterable[CacheSpec], limits: Limits) -> list[StepVariable]:
    """Return the step variables of a forward pass over packed tokens."""
    t, s, q, n = step_vars(limits)
    found = [
        StepVariable("ids", (t,), "i32", ADVANCED, TOKEN),
        StepVariable("pos", (t,), "i32", ADVANCED, TOKEN),
        StepVariable("q_start", (q,), "i32", FED, STEP),
        StepVariable("kv_len", (s,), "i32", ADVANCED, SEQUENCE),
        StepVariable("prefix_len", (s,), "i32", FED, SEQUENCE),
        StepVariable("rows", (n,), "i32", FED, ROW),
    ]
    for group in caches:
        found.append(StepVariable(f"slot.{group.name}", (t,), "i32", ADVANCED, TOKEN))
        width = limits.blocks
        found.append(StepVariable(f"table.{group.name}", (s, width), "i32", FED, SEQUENCE))
    return found


class Batch:
    """Graph inputs of one step: T tokens of S sequences, packed without padding.

    Attributes:
        limits: Limits that the graph is built for.
        caches: KV cache groups.
        leaves: Graph leaves by name, see `forward_variables`.
        ids, pos: Token ids and positions [T].
        q_start: Index of each sequence's first token in the step, and T [S + 1].
        kv_len: Tokens of each sequence in the cache, including this step's [S].
        rows: Indices of the tokens whose logits are computed [N].
        prefix_len: Length of each sequence's bidirectional prefix [S]; 0 for causal models.
        slot: Cache slot of each token [T], by cache group.
        table: Block table of each sequence [S, B], by cache group.
    """

    def __init__(self, caches: tuple[CacheSpec, ...], limits: Limits) -> None:
        self.limits, self.caches = limits, caches
        self.leaves = {v.name: v.leaf() for v in forward_variables(caches, limits)}
        self.ids, self.pos = self.leaves["ids"], self.leaves["pos"]
        self.q_start, self.kv_len = self.leaves["q_start"], self.leaves["kv_len"]
        self.rows, self.prefix_len = self.leaves["rows"], self.leaves["prefix_len"]
        self.slot = {c.name: self.leaves[f"slot.{c.name}"] for c in caches}
        self.table = {c.name: self.leaves[f"table.{c.name}"] for c in caches}
