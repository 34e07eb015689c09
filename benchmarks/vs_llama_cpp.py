"""Compare graphllm with llama.cpp in one interleaved run, on the same file and threads.

    pip install 'graphllm[demo,peers]'
    python benchmarks/vs_llama_cpp.py demo -p 128,512 -n 64 -d 0,4096 -t 2 -r 5 --rss
    python benchmarks/vs_llama_cpp.py demo -p 128 -n 32 -b 1,8 -t 2

Each test is a prefill (pp) or a decode (tg) after tokens that both caches already contain. Rates
are medians over the rounds. The ratio is computed per round, since the speed of a shared machine
drifts; its median, minimum and maximum are shown. The first round is a warm-up. Nothing is
tokenized; llama.cpp does not sample, graphllm samples greedily. ``--rss``: peak memory of each
side, in a separate process.

``-b``: instead, decode of many sequences at once. Each has ``-p`` tokens in the cache, and all
decode ``-n`` tokens together: graphllm through its engine, llama.cpp with one batch a step that has
a token of each sequence. The rates are those of all sequences. A gain is the rate of the same round
over that of the first number of sequences. llama.cpp has a KV cache for each sequence
(``kv_unified`` off), its faster setting where sequences share nothing.

To compare another instruction set than the machine's: NUMBA_CPU_NAME=haswell and
NUMBA_CPU_FEATURES= (empty) for graphllm, and a llama.cpp that was compiled for it
(``GGML_NATIVE=OFF``, ``GGML_AVX2=ON``). The first lines name both.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp

import graphllm
from graphllm.api import LLM
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.cli.bench import BenchGrid, parse_numbers
from graphllm.profiler.batch_bench import BatchTest, time_decode
from graphllm.profiler.bench import GREEDY, Test, filler_prompts, filler_tokens, time_once
from graphllm.profiler.engine_requests import finish, submitted
from graphllm.profiler.roofline import cpu_name


class Peer:
    """llama.cpp with one sequence in its KV cache. ``gpu_layers``: layers on the GPU; -1: all."""

    def __init__(
        self, path: Path, threads: int, context: int, flash: bool, gpu_layers: int = 0
    ) -> None:
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads,
            flash_attn=flash, n_gpu_layers=gpu_layers, verbose=False,
        )  # fmt: skip
        self._kept: list[int] = []  # prefix of the cache

    def _rewind(self, tokens: list[int]) -> None:
        """Leave exactly ``tokens`` in the cache."""
        if self._kept[: len(tokens)] != tokens:
            self.llama.reset()
            if tokens:
                self.llama.eval(tokens)
        self._kept = tokens
        self.llama.n_tokens = len(tokens)  # the next `eval` removes what follows

    def time_once(self, test: Test, tokens: list[int]) -> int:
        """Return the nanoseconds of one run of the test."""
        depth = test.depth if test.prompt else max(test.depth, 1)
        self._rewind(tokens[:depth])
        rest = tokens[depth : depth + test.tokens]
        start = time.perf_counter_ns()
        for piece in [rest] if test.prompt else [[token] for token in rest]:
            self.llama.eval(piece)
        return time.perf_counter_ns() - start


def row(name: str, test: Test, threads: int, llm: LLM, peer: Peer, rounds: int) -> str:
    """Run one test; return a row of the table."""
    tokens = filler_tokens(test.context, llm.decoder.cfg.vocab)
    pairs = [
        (time_once(llm.engine, test, tokens, number), peer.time_once(test, tokens))
        for number in range(rounds + 1)
    ][1:]  # the first pair warms up
    us, them = ([test.tokens * 1e9 / ns for ns in side] for side in zip(*pairs))
    ratios = [u / t for u, t in zip(us, them)]
    return (
        f"| {name} | {test.name} | {threads} | {statistics.median(us):.1f} | "
        f"{statistics.median(them):.1f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) |"
    )


# ----------------------------------------------------------------------------------- many sequences


class BatchPeer:
    """llama.cpp with a KV cache for each of ``count`` sequences of at most ``context`` tokens."""

    def __init__(self, path: Path, threads: int, context: int, count: int, flash: bool) -> None:
        llama_cpp.llama_backend_init()
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, None)
        model_settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_settings)
        own = llama_cpp.llama_context_default_params()
        own.n_ctx, own.n_seq_max = -(-context // 256) * 256 * count, count
        own.n_threads = own.n_threads_batch = threads
        own.kv_unified, own.flash_attn_type = False, int(flash)
        self.context = llama_cpp.llama_init_from_model(self.model, own)
        if not self.context:
            raise MemoryError(f"llama.cpp: no context for {count} sequences of {context} tokens")
        self._memory = llama_cpp.llama_get_memory(self.context)
        self._batch = llama_cpp.llama_batch_init(max(512, count), 0, 1)
        self._cached: list[list[int]] = []

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens (id, position, sequence, whether its logits are needed)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _prefill(self, texts: list[list[int]]) -> None:
        """Leave exactly ``texts`` in the caches."""
        for sequence, ids in enumerate(texts):
            if self._cached[sequence : sequence + 1] == [ids]:
                llama_cpp.llama_memory_seq_rm(self._memory, sequence, len(ids), -1)
                continue
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            for start in range(0, len(ids), 512):
                piece = enumerate(ids[start : start + 512], start)
                self._decode([(token, at, sequence, False) for at, token in piece])
        self._cached[: len(texts)] = texts

    def time_decode(self, test: BatchTest, texts: list[list[int]]) -> int:
        """Return the nanoseconds of ``test.gen`` steps; step i feeds token i of each text again."""
        self._prefill(texts)
        size = llama_cpp.llama_n_vocab(llama_cpp.llama_model_get_vocab(self.model))
        start = time.perf_counter_ns()
        for i in range(test.gen):
            self._decode([(ids[i], test.prompt + i, s, True) for s, ids in enumerate(texts)])
            logits = llama_cpp.llama_get_logits(self.context)  # waits for the step
        took = time.perf_counter_ns() - start
        last = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        assert all(last[s * size] == last[s * size] for s in range(test.batch)), "logits are NaN"
        return took


def time_sequences(llm: LLM, test: BatchTest, texts: list[list[int]]) -> int:
    """Return the nanoseconds that ``test.gen`` steps of all sequences take in graphllm."""
    engine = llm.engine
    with engine.lock.hold("a benchmark"):
        with submitted(engine, texts, GREEDY, 1) as first:
            finish(engine, first)
        return time_decode(engine, test, [each.sequence.tokens for each in first], GREEDY)


def batch_rows(
    name: str, tests: list[BatchTest], threads: int, llm: LLM, peer: BatchPeer, rounds: int
) -> list[str]:
    """Run the tests of all numbers of sequences in each round; return a row for each."""
    vocab = llm.decoder.cfg.vocab
    texts = {test: filler_prompts(test.batch, test.prompt, vocab) for test in tests}
    rates: dict[BatchTest, list[tuple[float, float]]] = {test: [] for test in tests}
    for _ in range(rounds + 1):
        for test in tests:
            took = time_sequences(llm, test, texts[test]), peer.time_decode(test, texts[test])
            rates[test].append(tuple(test.batch * test.gen * 1e9 / ns for ns in took))
    found = []
    for test, all_pairs in rates.items():
        pairs, base = all_pairs[1:], rates[tests[0]][1:]  # the first round warms up
        us, them = map(statistics.median, zip(*pairs))
        ratios = [u / t for u, t in pairs]
        gains = [statistics.median(p[i] / b[i] for p, b in zip(pairs, base)) for i in range(2)]
        found.append(
            f"| {name} | {test.name} | {threads} | {us:.1f} | {them:.1f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | "
            f"{gains[0]:.2f} | {gains[1]:.2f} |"
        )
    return found


def compare_batches(a: argparse.Namespace, path: Path) -> None:
    """Print the table of ``-b``."""
    prompts, gens, batches = (
        parse_numbers(flag, text) for flag, text in (("-p", a.p), ("-n", a.n), ("-b", a.batches))
    )
    print("| model | test | threads | graphllm t/s | llama.cpp t/s | ratio | gain | its gain |")
    print("|---|---|---:|---:|---:|---|---:|---:|", flush=True)
    context = max(prompts) + max(gens) + 2
    for threads in parse_numbers("-t", a.t):
        llm = graphllm.load(path, threads=threads, context=context, max_sequences=max(batches))
        peer = BatchPeer(path, threads, context, max(batches), a.flash_attn)
        for prompt in prompts:
            for gen in gens:
                tests = [BatchTest(prompt, gen, batch) for batch in batches]
                for line in batch_rows(path.stem, tests, threads, llm, peer, a.rounds):
                    print(line, flush=True)


# ------------------------------------------------------------------------------------------ memory


def peak_mb() -> float:
    """Return the peak memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def hold(side: str, model: str, threads: int, context: int, flash: bool) -> None:
    """Load one side, prefill 128 tokens, decode 16, and print the peak memory."""
    tests = Test(128, 0), Test(0, 16)
    if side == "ours":
        llm = graphllm.load(model, threads=threads, context=context)
        for test in tests:
            time_once(llm.engine, test, filler_tokens(test.context, llm.decoder.cfg.vocab), 0)
    else:
        peer = Peer(checkpoint_path(model), threads, context, flash)
        for test in tests:
            peer.time_once(test, filler_tokens(test.context, peer.llama.n_vocab()))
    print(peak_mb())


def memory_row(a: argparse.Namespace, name: str, threads: int) -> str:
    """Return the peak memory of both sides as a row."""
    words = [sys.executable, __file__, a.model, "-t", str(threads), "-c", str(a.context)]
    words += ["--flash-attn"] * a.flash_attn
    us, them = (
        float(subprocess.check_output([*words, "--hold", side], text=True))
        for side in ("ours", "theirs")
    )
    return f"| {name} | peak MB | {threads} | {us:.0f} | {them:.0f} | {us / them:.2f} |"


# -------------------------------------------------------------------------------------------- main


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-p", default="128", help="Prompt tokens, comma-separated; 0 for none.")
    parser.add_argument("-n", default="64", help="Generated tokens, comma-separated.")
    parser.add_argument("-d", default="0", help="Cached tokens, comma-separated.")
    parser.add_argument("-b", dest="batches", help="Sequences at once, comma-separated.")
    parser.add_argument("-t", default="2", help="Threads, comma-separated.")
    parser.add_argument("-c", dest="context", type=int, default=4096, help="Minimum context.")
    parser.add_argument("-r", dest="rounds", type=int, default=5)
    parser.add_argument("--rss", action="store_true", help="Also measure peak memory.")
    parser.add_argument("--flash-attn", action="store_true", help="Flash attention in llama.cpp.")
    parser.add_argument("--hold", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    a = arguments()
    if a.hold:
        hold(a.hold, a.model, int(a.t), a.context, a.flash_attn)
        return
    path = checkpoint_path(a.model)
    print(f"{cpu_name()}; graphllm: {isa()}")
    print(f"llama.cpp: {llama_cpp.llama_print_system_info().decode().strip()}\n")
    if a.batches:
        compare_batches(a, path)
        return
    tests = BenchGrid(a.p, a.n, a.d).tests()
    context = max([a.context, *(test.context for test in tests)])
    print("| model | test | threads | graphllm t/s | llama.cpp t/s | ratio |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for threads in parse_numbers("-t", a.t):
        if a.rss:
            print(memory_row(a, path.stem, threads), flush=True)
        llm = graphllm.load(path, threads=threads, context=context)
        peer = Peer(path, threads, context, a.flash_attn)
        for test in tests:
            print(row(path.stem, test, threads, llm, peer, a.rounds), flush=True)


if __name__ == "__main__":
    main()
