"""`AsyncLLM`: requests of asyncio tasks."""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace

import idle_engine
import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm import AsyncLLM, RequestError
from graphllm.api import async_llm
from graphllm.errors import ModelFileError, NumericError

SAMPLED = {"temperature": 0.9, "seed": 4, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("async") / "tiny.gguf", "llama")


@pytest.fixture(scope="module")
def llm(path):
    return graphllm.load(path, device="cpu", threads=1, max_sequences=8, chat_template="zephyr")


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    gc.collect()
    idle_engine.check(llm)


@pytest.fixture
def slow(llm, monkeypatch):
    """Each decode step takes at least 5 ms."""
    runner = llm.engine.batcher.runner
    decode = runner.decode
    monkeypatch.setattr(runner, "decode", lambda *step: (time.sleep(0.005), decode(*step)))


def run(main):
    return asyncio.run(asyncio.wait_for(main, 60))


async def text_of(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


def test_64_tasks_get_what_they_get_alone(llm):
    asks = [(f"hello {'x' * (i % 5)}", {**SAMPLED, "max_tokens": 4 + i % 9, "seed": i})
            for i in range(64)]  # fmt: skip
    want = [llm.generate(text, **ask) for text, ask in asks]
    before = llm.engine.batcher.steps

    async def main():
        own = AsyncLLM(llm)
        streams = [text_of(own.stream(text, **ask)) for text, ask in asks[::2]]
        complete = [own.generate(text, **ask) for text, ask in asks[1::2]]
        return await asyncio.gather(*streams, *complete)

    found = run(main())
    assert found[:32] == [done.text for done in want[::2]]
    assert [done.ids for done in found[32:]] == [done.ids for done in want[1::2]]
    assert llm.engine.batcher.steps - before < sum(len(done.ids) for done in want) / 3


def test_lists_and_chats(llm):
    each = [{"max_tokens": 3}, {"max_tokens": 6}]
    want = llm.generate(["hello", "what"], sampling=each, **SAMPLED)
    answer = llm.chat(MESSAGES, max_tokens=5, **SAMPLED)
    samples = llm.generate("hello", n=3, max_tokens=6, **SAMPLED)

    async def main():
        own = AsyncLLM(llm)
        have = await own.generate(["hello", "what"], sampling=each, **SAMPLED)
        assert [done.ids for done in have] == [done.ids for done in want]
        assert await own.generate([]) == []
        several = await own.generate("hello", n=3, max_tokens=6, **SAMPLED)
        assert [done.ids for done in several.choices] == [done.ids for done in samples.choices]
        with pytest.raises(RequestError, match=r"llm.stream yields the text of one sample"):
            own.stream("hello", n=3)
        assert (await own.chat(MESSAGES, max_tokens=5, **SAMPLED)).ids == answer.ids
        assert await text_of(own.chat_stream(MESSAGES, max_tokens=5, **SAMPLED)) == answer.text

    run(main())


@pytest.mark.parametrize("last_only", [False, True])
def test_several_samples_of_a_submitted_request(llm, last_only):
    want = llm.generate("hello", n=3, max_tokens=9, **SAMPLED)

    async def main():
        request = await AsyncLLM(llm).submit(
            "hello", n=3, max_tokens=9, last_only=last_only, **SAMPLED
        )
        text, ended = "", last_only
        while not ended:
            piece, ended = await request.poll()
            text += piece
        assert last_only or text == want.text
        done = await request.result()
        assert [each.ids for each in done.choices] == [each.ids for each in want.choices]
        assert [each.text for each in request.completions] == [each.text for each in want.choices]

    run(main())


def test_tasks_and_threads_share_the_batch(llm):
    want = [llm.generate(f"hello {n}", max_tokens=20, **SAMPLED).text for n in range(24)]
    found: dict[int, str] = {}

    def work(first: int) -> None:
        for n in range(first, 16, 2):
            found[n] = llm.generate(f"hello {n}", max_tokens=20, **SAMPLED).text

    async def ask(own, n: int) -> None:
        found[n] = await text_of(own.stream(f"hello {n}", max_tokens=20, **SAMPLED))

    async def main(first: int) -> None:
        own = shared
        await asyncio.gather(*(ask(own, n) for n in range(first, 24, 2)))

    shared = AsyncLLM(llm)
    works = [lambda n=n: work(n) for n in (0, 1)] + [lambda n=n: run(main(n)) for n in (16, 17)]
    threads = [threading.Thread(target=each, daemon=True) for each in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[n] for n in range(24)] == want


def test_the_event_loop_goes_on(llm, slow):
    """A task that only yields to the loop runs far more often than there are steps."""
    before = llm.engine.batcher.steps

    async def main() -> int:
        request = asyncio.create_task(AsyncLLM(llm).generate("hello", max_tokens=20, **SAMPLED))
        ticks = 0
        while not request.done():
            await asyncio.sleep(0)
            ticks += 1
        assert len(request.result().ids) == 20
        return ticks

    assert run(main()) > 5 * (llm.engine.batcher.steps - before)


def test_a_slow_consumer_does_not_stall_the_others(llm):
    want = llm.generate("hello", max_tokens=60, **SAMPLED).text

    async def main():
        own = AsyncLLM(llm)
        slow = own.stream("hello", max_tokens=60, **SAMPLED)
        first = await anext(slow)
        others = [own.generate(f"what {n}", max_tokens=30, **SAMPLED) for n in range(10)]
        assert [len(done.ids) for done in await asyncio.gather(*others)] == [30] * 10
        rest = [piece async for piece in slow]
        assert len(rest) < 10, "what came meanwhile is one piece"
        return first + "".join(rest)

    assert run(main()) == want


class SimulatedLoop:
    """An event loop and clocks whose time passes in `run`, and in `work`."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def call_soon_threadsafe(self, call: Callable[[], object]) -> None:
        self.call_later(0.0, call)

    def call_later(self, delay: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._number), call))

    def run(self, until: float) -> None:
        """Run what is due before ``until``."""
        while self._due and self._due[0][0] <= until:
            at, _, call = heapq.heappop(self._due)
            self.now = max(self.now, at)
            call()
        self.now = max(self.now, until)

    def work(self, seconds: float) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + seconds


@pytest.fixture
def loop(monkeypatch) -> SimulatedLoop:
    found = SimulatedLoop()
    clocks = SimpleNamespace(perf_counter=lambda: found.now, thread_time=lambda: found.cpu)
    monkeypatch.setattr(async_llm, "time", clocks)
    return found


@pytest.mark.parametrize(("work", "rest"), [(2e-3, 25e-3), (4e-4, 10e-3)])
def test_the_loop_rests_between_deliveries(loop, work, rest):
    """Results come each millisecond; their deliveries take 4 % of the time, or 25 ms pass."""
    mailbox, times = async_llm._Mailbox(loop), list[float]()

    def arrived() -> None:
        times.append(loop.now)
        loop.work(work)

    for step in range(200):
        loop.run(step * 1e-3)
        if len(mailbox._calls) == 0:  # a listener posts one call for all of its results
            mailbox.post(arrived)
    assert len(times) > 5 and min(np.diff(times)) >= rest - 1e-9
    assert max(np.diff(times)) <= rest + 1.1e-3


def test_the_first_result_does_not_wait_for_the_next_delivery(loop):
    mailbox, order = async_llm._Mailbox(loop), list[tuple[str, float]]()

    def call(name: str) -> None:
        order.append((name, round(loop.now, 6)))
        loop.work(2e-3)

    mailbox.post(partial(call, "long"))
    loop.run(5e-3)
    mailbox.post(partial(call, "next"))
    mailbox.post_now(partial(call, "first"))
    loop.run(0.1)
    assert order == [("long", 0.0), ("first", 5e-3), ("next", 25e-3)]


def test_all_results_of_a_request_with_a_listener_arrive(llm):
    want = llm.generate("hello", max_tokens=200, **SAMPLED)
    calls = list[int]()

    async def main() -> tuple[str, str]:
        own = AsyncLLM(llm)
        asks = {"max_tokens": 200, **SAMPLED}
        request = await own.submit("hello", arrived=lambda: calls.append(1), **asks)
        other = (await own.generate("hello", **asks)).text
        return (await request.result()).text, other

    assert run(main()) == (want.text, want.text)
    assert len(calls) >= 2  # the first and the last result come at once


@pytest.mark.parametrize("how", ["cancel", "timeout", "aclose", "break", "submitting"])
def test_a_cancelled_task_cancels_its_request(llm, slow, how):
    want = llm.generate("what", max_tokens=10, **SAMPLED).text
    ask = {**SAMPLED, "max_tokens": 120}

    async def cancelled(own) -> None:
        if how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(own.generate(["hello", "hello there"], **ask), 0.05)
        elif how == "cancel":
            task = asyncio.create_task(text_of(own.stream("hello", **ask)))
            while not llm.engine.batcher.generations:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "submitting":
            task = asyncio.create_task(own.generate("hello", **ask))
            await asyncio.sleep(0)
            task.cancel()
        elif how == "aclose":
            stream = own.stream("hello", **ask)
            await anext(stream)
            await stream.aclose()
        else:
            async for _ in own.stream("hello", **ask):
                break

    async def main():
        own, start = AsyncLLM(llm), llm.engine.batcher.steps
        other = asyncio.create_task(own.generate("what", max_tokens=10, **SAMPLED))
        await cancelled(own)
        assert (await other).text == want
        await asyncio.to_thread(llm.engine.worker.join)
        assert llm.engine.batcher.steps - start < 60

    run(main())


def test_errors_arrive_at_the_task(llm, tmp_path, monkeypatch):
    weights = tiny.llama_weights()
    weights["model.embed_tokens.weight"][42, 9] = np.nan
    bad = graphllm.load(tiny.write_llama(tmp_path / "nan.gguf", weights), device="cpu", threads=1)

    async def main():
        own = AsyncLLM(llm)
        for call, message in (
            (own.generate("a", temperature=-1), "temperature = -1"),
            (own.generate(["a", "b"], sampling=[{}]), "sampling has 1 elements"),
            (own.generate([5] * 1000), "the context holds"),
            (own.generate(["a", [5] * 1000]), "the context holds"),
            (anext(own.stream([10**6])), "token id 1000000 is not in"),
            (own.chat("hello"), "pass a string to llm.generate"),
        ):
            with pytest.raises(RequestError, match=message):
                await call
        for call in (lambda: own.stream(["a", "b"]), lambda: own.stream("a", temprature=1)):
            with pytest.raises(RequestError):
                call()
        async with AsyncLLM(bad) as wrong:
            right = asyncio.create_task(wrong.generate([5, 6], max_tokens=9, allowed_ids=[8]))
            with pytest.raises(NumericError, match="embed_tokens"):
                await wrong.generate([5, 42, 7])
            with pytest.raises(NumericError, match="embed_tokens"):
                await anext(wrong.stream([5, 42, 7]))
            assert (await right).ids == [8] * 9

        def fail(*step):
            raise LookupError("my own")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
        asked = [own.generate("what", **SAMPLED), text_of(own.stream("is", **SAMPLED))]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in failed] == ["my own"] * 2
        monkeypatch.undo()
        assert len((await own.generate("hello", max_tokens=3, **SAMPLED)).ids) == 3

    run(main())


def test_closing_and_the_end_of_a_block(path, monkeypatch):
    """A whole answer is finished, a stream ends with an error, and no thread is left."""
    closing, steps = threading.Event(), itertools.count()

    def hold_until_closing(runner, llm):  # so that the stream does not end before
        decode, close = runner.decode, llm.close

        def held(*step):
            assert next(steps) < 10 or closing.wait(60)
            return decode(*step)

        monkeypatch.setattr(runner, "decode", held)
        monkeypatch.setattr(llm, "close", lambda: (closing.set(), close()))

    async def main():
        async with await AsyncLLM.load(path, device="cpu", threads=1) as own:
            hold_until_closing(own.llm.engine.batcher.runner, own.llm)
            whole = asyncio.create_task(own.generate("hello", max_tokens=100, **SAMPLED))
            stream = own.stream("hello", max_tokens=120, **SAMPLED)
            await anext(stream)
        assert len((await whole).ids) == 100
        with pytest.raises(RequestError, match=r"^the model is closed$"):
            await text_of(stream)
        await own.close()
        with pytest.raises(RequestError, match=r"^the model is closed$"):
            await own.generate("x")
        assert not [t for t in threading.enumerate() if t.name == "graphllm-worker"]

    run(main())


@pytest.mark.parametrize("what", ["tasks", "loop"])
def test_ctrl_c_and_an_abandoned_loop(llm, slow, what):
    """Ctrl-C in `asyncio.run`; a loop that is closed while requests run."""
    own = AsyncLLM(llm)

    async def main() -> None:
        asks = [own.generate(f"hello {n}", max_tokens=120, **SAMPLED) for n in range(12)]
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        while not llm.engine.batcher.generations:
            await asyncio.sleep(0.001)
        if what == "tasks":
            asyncio.get_running_loop().call_later(0.02, signal.raise_signal, signal.SIGINT)
            await asyncio.gather(*tasks)

    if what == "tasks":
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_default_executor())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False
        loop.close()
        gc.collect()
    idle_engine.check(llm)
    assert len(run(own.generate("hello", max_tokens=3, **SAMPLED)).ids) == 3


def test_a_model_without_a_tokenizer(tmp_path):
    import hf_files

    llm = graphllm.load(hf_files.write(tmp_path / "hf", eos_token_id=2), device="cpu", threads=1)
    own = AsyncLLM(llm)
    ids = run(own.generate([1, 5, 7], max_tokens=4, temperature=0, ignore_eos=True)).ids
    assert ids == llm.generate([1, 5, 7], max_tokens=4, temperature=0, ignore_eos=True).ids
    with pytest.raises(ModelFileError, match="no tokenizer"):
        own.stream([1, 5])
