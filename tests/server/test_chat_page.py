"""The chat page in a browser: chats with a server, and answers that try to be more than text."""

from __future__ import annotations

import gc
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import idle_engine
import pytest
import tiny_models as tiny
from browser import Browser, Page
from running_server import KEY, Running

import graphllm
from graphllm.html.page import inline_page
from graphllm.server.chat_page import SCRIPTS, chat_page

pytestmark = pytest.mark.browser
PACKAGE = "graphllm.server.chat_page"
# A stopped answer. Chromium reports it for some streams, too, that were read to their end.
ABORTED = "failed: net::ERR_ABORTED"
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "[a](javascript:window.hacked=1) [b](JAVASCRIPT:window.hacked=1) [c](data:text/html,x)",
    "![picture](https://example.com/x.png)",
    "\x1b[31mred\x1b[0m \x07",
    "```html\n</code></pre><script>window.hacked = 1</script>\n```",
    "| <b>x</b> | [d](vbscript:x) |\n|---|---|\n| <svg onload=window.hacked=1> | y |",
    '```js" onclick="window.hacked=1\nx\n```',
]
BILL = {"wall_ns": 2_000_000, "steps": 3, "tokens": 9, "recomputed_tokens": 0, "rows": [
    {"name": "linear <b>q8_0</b>", "ns": 1_500_000, "bytes": 3e6, "flops": 6e6},
    {"name": "host", "ns": 500_000}, {"name": "queue", "ns": 0},
]}  # fmt: skip
# Any one of them takes minutes if its time grows with the square of the length.
LONG = [
    "`", "*", "_", "~~", "[", "![", "](", "> ", "- ", "#", "|", "\\", "a`", "` ``", "*a ", "a* ",
    "[a](", "http://", "https://%", "[https://-", "1. ", "-|", "<b>",
    "\n> ", "\n- ", "\n\n", "\n```\n", "  \n", "\n |",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


Opener = Callable[[str], Page]


@pytest.fixture
def opened(browser) -> Iterator[Opener]:
    """Open addresses; check at the end that no page has an error."""
    pages: list[Page] = []

    def opener(address: str, **window: Any) -> Page:
        pages.append(browser.open(address, **window))
        return pages[-1]

    yield opener
    for each in pages:
        each.evaluate("localStorage.clear()")
        problems = set(each.problems()) - {ABORTED}
        each.close()
        assert not problems


def wait(page: Page, condition: str) -> None:
    """Wait for a condition of the page."""
    page.evaluate(f"""new Promise((done, failed) => {{
        const end = performance.now() + 30000;
        const look = () => {{
            if ({condition}) done(true);
            else if (performance.now() > end) failed(new Error("the page does not get there"));
            else setTimeout(look, 10);
        }};
        look();
    }})""")


def texts(page: Page, selector: str) -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )


def ask(page: Page, text: str) -> None:
    page.click("#question")
    page.type(text)
    page.key("Enter")


def wait_for_answers(page: Page, count: int) -> None:
    wait(page, f"document.querySelectorAll('.answer').length === {count} && "
               "!document.querySelector('[aria-busy]')")  # fmt: skip


# ------------------------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> graphllm.LLM:
    path = tiny.write_tiny(tmp_path_factory.mktemp("page") / "tiny.gguf", "llama")
    return graphllm.load(path, device="cpu", threads=1, max_sequences=4, chat_template="zephyr")


@pytest.fixture(scope="module")
def server(llm) -> Iterator[Running]:
    running = Running(llm)
    yield running
    running.stop()
    gc.collect()
    idle_engine.check(llm)


def address(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}/"


def sampling(page: Page, **values: float | str) -> None:
    """Fill in the settings, by keyboard and mouse as a user does."""
    page.click("#adjust")
    for name, value in values.items():
        page.click(f"#{name}")
        page.evaluate(f"document.getElementById('{name}').select()")
        page.type(str(value))
    page.click("#settings .main")


def test_a_chat(llm, server, opened):
    """Each answer is that of the Python API; conversations outlast a reload."""
    page = opened(address(server))
    wait(page, "document.title === 'tiny: chat'")
    sampling(page, temperature=0, max_tokens=12, system="be brief")
    ask(page, "hello")
    wait_for_answers(page, 1)
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    want = llm.chat(history, temperature=0, max_tokens=12, penalty_last_n=-1)
    stored = "JSON.parse(localStorage['graphllm.conversations'])"
    assert page.evaluate(f"{stored}[0].messages[1].content") == want.text
    (cost,) = texts(page, ".cost")
    assert cost.startswith("ended at the limit of tokens · 12 tokens · ")
    assert "first token after" in cost and cost.endswith(f"prompt of {len(want.prompt_ids)}")
    ask(page, "again?")
    wait_for_answers(page, 2)
    history += [{"role": "assistant", "content": want.text}, {"role": "user", "content": "again?"}]
    second = llm.chat(history, temperature=0, max_tokens=12, penalty_last_n=-1).text
    assert page.evaluate(f"{stored}[0].messages[3].content") == second
    page.click(".answer .again")  # without what followed the first answer
    wait_for_answers(page, 1)
    assert page.evaluate(f"{stored}[0].messages.map(m => m.content)") == ["hello", want.text]
    page.click("#new")
    ask(page, "<b>other</b>")
    wait_for_answers(page, 1)
    assert texts(page, ".open") == ["<b>other</b>", "hello"]
    page.load(address(server))
    assert texts(page, ".open") == ["<b>other</b>", "hello"]
    page.click("li:nth-child(2) .open")
    assert texts(page, ".typed") == ["hello"]
    page.click(".edit")
    assert page.evaluate("document.querySelector('#question').value") == "hello"
    page.key("Escape")
    assert not page.evaluate("document.querySelector('#question').value")
    page.click(".edit")
    page.type(" there")
    page.key("Enter")
    wait_for_answers(page, 1)
    assert texts(page, ".typed") == ["hello there"]
    assert texts(page, ".open") == ["hello there", "<b>other</b>"]
    page.click(".remove")  # the current one
    assert texts(page, ".open") == ["<b>other</b>"] and texts(page, ".typed") == ["<b>other</b>"]
    page.click(".remove")
    page.load(address(server))
    assert not texts(page, ".open") and not texts(page, ".typed")


def test_windows_keep_the_conversations_of_each_other(canned, opened):
    one, two = opened(canned), opened(canned)
    ask(one, "0")
    wait_for_answers(one, 1)
    ask(two, "1")
    wait_for_answers(two, 1)
    one.click("#new")
    ask(one, "2")
    wait_for_answers(one, 1)
    assert texts(one, ".open") == ["2", "0", "1"]
    one.load(canned)
    one.evaluate("localStorage.setItem('filler', 'x'.repeat(5e6))")
    ask(one, "x" * 400_000)  # more than what is left
    wait(one, "!document.querySelector('#room').hidden")
    two.load(canned)
    assert len(texts(two, ".open")) == 3  # nothing that was stored is lost


def test_a_key_is_asked_for(llm, browser):
    running = Running(llm, keys=[KEY])
    page = browser.open(address(running))
    try:
        wait(page, "document.querySelector('dialog[open] #key')")
        page.click("#key")
        page.type(KEY)
        page.key("Enter")
        wait(page, "document.title === 'tiny: chat'")
        assert not page.evaluate("JSON.stringify(localStorage).includes('secret')")
        assert all("401" in each for each in page.problems())
    finally:
        page.close()
        running.stop()


# -------------------------------------------------------------------------------- hostile answers


class Canned(http.server.BaseHTTPRequestHandler):
    """A server whose model answers with an element of HOSTILE, a few characters an event.

    The question is its index; any other question has an answer without an end.
    """

    models: tuple[str, ...] = ("<i>canned</i>",)
    closed = threading.Event()  # by the client, in mid-answer

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, kind: str, text: str, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"content-type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/":
            policy = {"content-security-policy": chat_page().policy}
            return self._send("text/html; charset=utf-8", chat_page().text, **policy)
        data = [{"id": name} for name in self.models]
        return self._send("application/json", json.dumps({"data": data}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][-1]["content"]
        if not question.isdecimal():
            return self._infinite()
        answer = HOSTILE[int(question)]
        events = [
            {"choices": [{"delta": {"content": answer[i : i + 7]}, "finish_reason": None}]}
            for i in range(0, len(answer), 7)
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        if body.get("x_profile"):
            lines.append(f"data: {json.dumps({'choices': [], 'x_profile': BILL})}\n\n")
        self._send("text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def _infinite(self) -> None:
        event = 'data: {"choices": [{"delta": {"content": "on and "}}]}\n\n'
        self._send("text/event-stream", event)
        try:
            while not self.closed.wait(0.01):
                self.wfile.write(event.encode())
        except OSError:
            self.closed.set()


class Models(Canned):
    """As Canned, with two models, which answer with their names."""

    models = ("first", "<b>second</b>")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        event = {"choices": [{"delta": {"content": f"I am {body['model']}"}}]}
        self._send("text/event-stream", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")


@contextmanager
def serving(handler: type[Canned]) -> Iterator[str]:
    """Serve in a thread; the address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def canned() -> Iterator[str]:
    with serving(Canned) as found:
        yield found


def test_each_conversation_keeps_its_model(opened):
    """The chosen one is sent, outlasts a reload, and is that of the next conversation."""
    choose = """(() => {
        const list = document.querySelector("#models");
        list.value = list.options[%d].value;
        list.dispatchEvent(new Event("change"));
    })()"""
    answers = """JSON.parse(localStorage["graphllm.conversations"])[%d].messages
        .filter(each => each.role === "assistant").map(each => each.content)"""
    second = Models.models[1]
    with serving(Models) as where:
        page = opened(where)
        wait(page, "document.querySelectorAll('#models option').length === 2")
        assert texts(page, "#models option") == list(Models.models)
        assert not page.evaluate("document.querySelector('#models').hidden")
        ask(page, "0")
        wait_for_answers(page, 1)
        page.evaluate(choose % 1)
        ask(page, "1")
        wait_for_answers(page, 2)
        assert page.evaluate(answers % 0) == ["I am first", f"I am {second}"]
        page.click("#new")
        wait(page, f"document.title === {json.dumps(second + ': chat')}")
        page.evaluate(choose % 0)
        ask(page, "2")
        wait_for_answers(page, 1)
        page.load(where)
        wait(page, "document.title === 'first: chat'")
        page.click("li:nth-child(2) .open")
        wait(page, f"document.title === {json.dumps(second + ': chat')}")
        page.click(".answer:last-child .again")
        wait_for_answers(page, 2)
        assert page.evaluate(answers % 0) == ["I am first", f"I am {second}"]


def test_hostile_answers_stay_text(canned, opened):
    page = opened(canned)
    for index in range(len(HOSTILE)):
        ask(page, str(index))
        wait_for_answers(page, index + 1)
    assert page.evaluate("window.hacked") is None
    shown = "\n".join(texts(page, ".answer > .text"))
    for part in ("<script>window.hacked = 1</script>", "<img src=x", "javascript:w", "␛[31mred"):
        assert part in shown
    assert page.evaluate("[...document.querySelectorAll('.text a')].map(a => a.href)") == [
        "https://example.com/x.png"
    ]
    found = page.evaluate("[...new Set([...document.querySelectorAll('#messages *')].map("
                          "e => e.localName))].sort()")  # fmt: skip
    assert not {"script", "img", "svg", "b", "iframe"} & set(found)


def test_the_bill_of_an_answer(canned, opened):
    page = opened(canned)
    page.click("#adjust")
    page.click("#x_profile")
    page.click("#settings .main")
    ask(page, "0")
    wait_for_answers(page, 1)
    want = ["linear <b>q8_0</b>1.50075.0 %2.04.0", "host0.50025.0 %"]
    assert texts(page, ".bill tbody tr") == want
    assert texts(page, ".bill tfoot tr") == ["all, 3 steps, 9 tokens computed2.000100.0 %"]
    page.load(canned)
    assert texts(page, ".bill tbody tr") == want


@pytest.mark.parametrize("key", ["Escape", "button"])
def test_stop_closes_the_connection(canned, opened, key):
    Canned.closed.clear()
    page = opened(canned)
    ask(page, "on")
    wait(page, "document.querySelector('.answer > .text').textContent.length > 20")
    if key == "button":
        page.click("#stop")
    else:
        page.key(key)
    wait_for_answers(page, 1)
    assert texts(page, ".cost") == ["stopped"] and Canned.closed.wait(60)
    assert "on and on" in texts(page, ".answer > .text")[0]


@pytest.fixture(scope="module")
def renderer(browser) -> Iterator[Page]:
    """A page with the functions of the renderer."""
    page = browser.open("about:blank")
    sources = [files("graphllm.html") / "dom.js", files(PACKAGE) / "markdown.js"]
    page.evaluate("\n".join(each.read_text("utf-8") for each in sources) + "\nnull")
    yield page
    page.close()


def html(page: Page, text: str) -> str:
    return page.evaluate(f"markdownBlocks({json.dumps(text)}).map(b => b[1].outerHTML).join('')")


LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.mark.parametrize("text, want", [
    ("a *b* **c** ***d*** ~~e~~ `f`", "<p>a <em>b</em> <strong>c</strong> "
     "<strong><em>d</em></strong> <del>e</del> <code>f</code></p>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    ("`` a`b `` \\*x\\* `c", "<p><code>a`b</code> *x* `c</p>"),
    ("# A\n## B #1\ntext", "<h3>A</h3><h4>B #1</h4><p>text</p>"),
    ("- a\n- b\n  - c\n\n    d\n1. e\n2) f", "<ul><li>a</li><li>b<ul><li>c<p>d</p></li></ul>"
     "</li></ul><ol><li>e</li><li>f</li></ol>"),
    ("> a\n> > b\n\n---\n3. x", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"
     "<hr><ol start=\"3\"><li>x</li></ol>"),
    ("|a|b\\|c|\n|-|:-:|\n|`d`|e|f|\nrest", '<div class="wide" tabindex="0"><table><thead><tr>'
     "<th>a</th><th>b|c</th></tr></thead><tbody><tr><td><code>d</code></td><td>e</td></tr></tbody>"
     "</table></div><p>rest</p>"),
    ("see https://a.example/x?y=1. and [t*u*](mailto:a@b.example) [x](y) [z",
     f'<p>see <a href="https://a.example/x?y=1" {LINK}>https://a.example/x?y=1</a>. and '
     f'<a href="mailto:a@b.example" {LINK}>t<em>u</em></a> [x](y) [z</p>'),
])  # fmt: skip
def test_markdown(renderer, text, want):
    assert html(renderer, text) == want


def test_code_blocks(renderer):
    text = "x\n```py\nif a < b:\n\n    pass\n```\n~~~\n```\n~~~\n```\nopen"
    script = f"""markdownBlocks({json.dumps(text)}).map(([at, e]) =>
        [at, e.querySelector("code")?.textContent, e.querySelector("span")?.textContent])"""
    assert renderer.evaluate(script) == [
        [0, None, None], [2, "if a < b:\n\n    pass", "py"], [32, "```", ""], [44, "open", ""],
    ]  # fmt: skip


@pytest.mark.parametrize("sign", LONG)
def test_a_megabyte_of_marks_stays_text(renderer, sign):
    """All text is kept, in a time that a square of the length would exceed by far."""
    renderer.evaluate(f"""(() => {{
        const text = "x" + {json.dumps(sign)}.repeat(1e6 / {len(sign)});
        const blocks = markdownBlocks(text);
        if (!blocks.length) throw new Error("nothing is shown");
    }})()""")


def test_growing_text_ends_as_the_whole_text(renderer):
    """Blocks that were complete are not drawn again."""
    text = "a\n\n- b\n- c\n\n```\nd\n\ne\n```\n\n|f|g|\n|---|---|\n|h|i|\n\n> j\n\nk **l** m"
    messages = (files(PACKAGE) / "messages.js").read_text("utf-8")
    whole, grown = renderer.evaluate(f"""(() => {{
        {messages}
        const text = {json.dumps(text)}, growing = new GrowingMarkdown("text");
        for (const sign of text) {{ growing.text += sign; growing.draw(); }}
        const whole = markdownBlocks(text).map(b => b[1].outerHTML).join("");
        return [whole, growing.element.innerHTML];
    }})()""")
    assert grown == whole


# ------------------------------------------------------------------------------------- the page


def test_the_page_needs_and_allows_nothing_else(llm, server):
    connection = server.connect()
    connection.request("GET", "/")
    response = connection.getresponse()
    text, policy = response.read().decode(), response.headers["content-security-policy"]
    connection.close()
    assert text == chat_page().text and "innerHTML" not in text and "eval(" not in text
    kinds = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert kinds.pop("style-src").startswith("'sha256-")
    assert kinds.pop("script-src").startswith("'sha256-")
    assert kinds == {
        "default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'",
        "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert inline_page(PACKAGE, SCRIPTS, "", {}).text != text  # the policy is part of the page


@pytest.mark.parametrize("dark", [False, True])
def test_layout(server, opened, dark):
    """Everything fits a narrow window, every control has a name, and text has enough contrast."""
    page = opened(address(server), width=360, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#list")
    page.click("#new")
    page.click("#adjust")
    names = page.evaluate("""[...document.querySelectorAll("button, input, textarea")].map(e =>
        e.getAttribute("aria-label") || e.textContent.trim() || (e.labels[0] || {}).textContent)""")
    assert all(names)
