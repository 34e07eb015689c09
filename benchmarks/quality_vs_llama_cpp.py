"""Compare perplexity and KL divergence with llama.cpp's, on the same files and text.

    pip install 'graphllm[demo,peers]'
    python benchmarks/quality_vs_llama_cpp.py demo -f tests/golden/alice_chapter_1.txt
    python benchmarks/quality_vs_llama_cpp.py other.gguf --base demo -f text.txt -c 512 -t 2

llama.cpp decodes each chunk with llama_decode; the statistics are computed from its float logits as
its perplexity tool computes them, but without the tool's 16-bit log-probabilities of the base.
graphllm writes a base file and reads it. Both tokenize the text themselves.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np

import graphllm
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.quality.base_file import BaseFile
from graphllm.quality.divergence_report import Divergence, Statistic
from graphllm.quality.kl_divergence import compare_with_base, save_base
from graphllm.quality.perplexity import Perplexity, perplexity, split_text


class Peer:
    """llama.cpp, computing chunks of a text."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads,
            logits_all=True, verbose=False,
        )  # fmt: skip
        self.context = context

    def chunks(self, text: str) -> np.ndarray:
        """Return the chunks of a text as the perplexity tool computes them."""
        model = self.llama
        ids = model.tokenize(text.encode(), add_bos=True, special=False)
        count = len(ids) // self.context
        found = np.array(ids[: count * self.context]).reshape(count, self.context)
        vocab = llama_cpp.llama_model_get_vocab(model._model.model)
        if llama_cpp.llama_vocab_get_add_bos(vocab):
            found[:, 0] = model.token_bos()
        return found

    def logprobs(self, chunk: np.ndarray) -> np.ndarray:
        """Return log-probabilities float64 [n, vocab] at the predicted tokens of a chunk."""
        model = self.llama
        model.reset()
        model.eval(chunk.tolist())
        rows = model.scores[self.context // 2 : self.context - 1].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def peer_divergence(peer: Peer, base: Peer, text: str) -> Divergence:
    """Return llama.cpp's divergence of one model from another."""
    chunks = peer.chunks(text)
    assert np.array_equal(chunks, base.chunks(text))
    found = [
        _columns(peer.logprobs(c), base.logprobs(c), c[peer.context // 2 + 1 :]) for c in chunks
    ]
    return Divergence(peer.context, *np.moveaxis(np.array(found), 1, 0))


def _columns(own: np.ndarray, base: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    rows = np.arange(len(ids))
    terms = np.where(base > -16, np.exp(base) * (base - own), 0)
    same = own.argmax(axis=1) == base.argmax(axis=1)
    return [own[rows, ids], base[rows, ids], terms.sum(axis=1), same]


def peer_perplexity(peer: Peer, text: str) -> Perplexity:
    """Return llama.cpp's perplexity of a text."""
    first = peer.context // 2 + 1
    found = [
        peer.logprobs(chunk)[np.arange(peer.context - first), chunk[first:]]
        for chunk in peer.chunks(text)
    ]
    return Perplexity.of(np.array(found), peer.context)


def lines(ours: list[Statistic], theirs: list[Statistic]) -> Iterator[str]:
    """Yield a line for each statistic."""
    for own, other in zip(ours, theirs):
        change = own.value / other.value - 1 if other.value else 0.0
        yield f"{own.name:<24} {own.value:>12.6f} {other.value:>12.6f} {change:>+10.2%}"


def main() -> None:
    """Print both sides' statistics."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--base", help="model to compare with")
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--linear", default="auto")
    given = parser.parse_args()
    text, options = given.file.read_text("utf-8"), {"context": given.ctx_size}
    options |= {"threads": given.threads, "linear": given.linear}
    peer = Peer(Path(checkpoint_path(given.model)), given.ctx_size, given.threads)
    print(f"{'':<24} {'graphllm':>12} {'llama.cpp':>12}")
    if given.base is None:
        with graphllm.load(given.model, **options) as llm:
            ours = perplexity(llm, split_text(llm, text, given.ctx_size))
        theirs = peer_perplexity(peer, text)
        for line in lines([Statistic("PPL", ours.value)], [Statistic("PPL", theirs.value)]):
            print(line)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base"
        with graphllm.load(given.base, **options) as llm:
            save_base(llm, split_text(llm, text, given.ctx_size), path)
        with graphllm.load(given.model, **options) as llm, BaseFile(path) as base:
            own = compare_with_base(llm, base)
    base_peer = Peer(Path(checkpoint_path(given.base)), given.ctx_size, given.threads)
    other = peer_divergence(peer, base_peer, text)
    for group in ("perplexities", "divergences", "probabilities"):
        for line in lines(getattr(own, group)(), getattr(other, group)()):
            print(line)


if __name__ == "__main__":
    main()
