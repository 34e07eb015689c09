"""Hostile templates: limits on time, memory and errors; the sandbox; the rendering process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import hostile_templates as hostile
import pytest

from graphllm.chat import PROCESS, TEMPLATES, ChatTemplate
from graphllm.chat.renderer_process import RendererProcess
from graphllm.errors import ModelFileError, RequestError

SAY = [{"role": "user", "content": "hello"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source, messages=SAY, **variables):
    return ChatTemplate(source, "test", TOKENS).render(messages, **variables)


_SAMPLE = random.Random(1).sample(sorted(hostile.templates()), 6)


@pytest.mark.parametrize("name", [*hostile.REPORTED, *_SAMPLE])
def test_a_hostile_template_is_bounded(name):
    """Limit the CPU time, since the wall time depends on the load of the machine.

    `tests/fuzz/hostile_templates.py` renders all hostile templates.
    """
    PROCESS.close()
    before = hostile.cpu_s()
    hostile.render(hostile.templates()[name])
    PROCESS.close()
    assert hostile.cpu_s() - before < 2.0  # including the start of the process


def test_memory_is_bounded():
    """The limit does not count the input, which may be large itself."""
    big = [{"role": "user", "content": "x" * (4 << 20)}]
    assert len(render("{{ messages[0].content ~ messages[0].content }}", big)) == 8 << 20
    with pytest.raises(RequestError, match="test: rendering needs more than 64 MB of memory"):
        render("{{ ('a' * (65 * 1048576)) | length }}")
    with pytest.raises(RequestError, match="the prompt is larger than 16777216 bytes"):
        render("{{ 'a' * 17000000 }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1 }}" * 50_000, "the template has 350000 characters, more than 262144"),
        ("{{ x.y }}" * 29_000, "rendering takes more than 10? s"),
        ("{{ " + "1+" * 100_000 + "1 }}", "more than 10? s|RecursionError"),
    ],
)
def test_compiling_is_bounded(source, message):
    with pytest.raises(ModelFileError, match=message):
        ChatTemplate(source, "test", TOKENS)


def test_an_error_is_one_line_of_limited_length():
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('no\n\nsuch' ~ 'a' * 9000000) }}")
    assert str(caught.value).startswith("test: no suchaaa") and len(str(caught.value)) < 1100
    assert "\n" not in str(caught.value)


ROOTS = ("''", "[]", "{}", "1", "1.5", "none", "messages", "messages[0]", "messages[0].content",
         "namespace()", "dict", "range", "cycler('a')", "joiner()", "raise_exception",
         "strftime_now", "loop", "self", "caller", "''.format", "[].append", "lipsum")  # fmt: skip
STEPS = (
    ".__class__", "['__class__']", "|attr('__class__')", ".__init__.__globals__",
    ".__subclasses__()",
    "|attr('__globals__')", ".mro()", ".__reduce__()", "|map(attribute='__class__')|list|first",
    "._shadow", ".gi_frame", ".f_globals", ".__func__", "|attr('\\x5f_class__')",
)  # fmt: skip


@pytest.mark.parametrize("root", ROOTS)
def test_internals_are_unreachable_from_the_sandbox(root):
    """Attributes of Python's internals are rejected or undefined on every object."""
    for step in STEPS:
        source = (
            "{% for i in [1] %}{% macro m() %}{{ X.y.z ~ X() }}{% endmacro %}{{ m() }}{% endfor %}"
        )
        with pytest.raises(RequestError):
            render(source.replace("X", f"(({root}){step})"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__.__mro__}'.format(1) }}", "{{ '{0.__class__}'.format_map({'0': 1}) }}",
        "{{ ['{0.__class__}'] | map('format', 1) | list | first | attr('x') | length }}"
        "{{ '{x.__class__}'.format(x=messages) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = range %}",
        "{{ namespace(__call__=range) }}",
        "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ {}.pop(1) }}",
        "{{ [].sort() }}", "{{ 'a'.encode() }}", "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}", "{% extends 'x' %}", "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages | map('attr', '__class__') | first ~ x.y.z }}",
    ],
)  # fmt: skip
def test_known_sandbox_escapes(source):
    with pytest.raises(RequestError):
        render(source)


# ----------------------------------------------------------------------------------- the process


def test_the_process_is_reused_and_replaced():
    assert render("{{ messages[0].content }}") == "hello"
    first = PROCESS._process.pid
    assert render("{{ bos_token }}") == "<s>" and PROCESS._process.pid == first
    with pytest.raises(RequestError, match=r"takes more than 10? s"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert render("{{ bos_token }}") == "<s>" and PROCESS._process.pid != first
    os.kill(PROCESS._process.pid, signal.SIGKILL)
    PROCESS._process.wait()
    assert render("{{ bos_token }}") == "<s>"


def test_threads_get_their_own_replies():
    wrong = []

    def ask(number):
        own = ChatTemplate("{{ messages[0].content ~ X }}".replace("X", str(number)), "test")
        for turn in range(50):
            got = own.render([{"role": "user", "content": f"{turn} "}])
            if got != f"{turn} {number}":
                wrong.append(got)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_interrupt_leaves_no_reply_behind(monkeypatch):
    """The next request must not receive the reply of the interrupted one."""
    own = ChatTemplate("{{ messages[0].content }}", "test")
    receive = RendererProcess._receive

    def interrupted(self, seconds):
        monkeypatch.setattr(RendererProcess, "_receive", receive)
        raise KeyboardInterrupt

    own.render(SAY)
    monkeypatch.setattr(RendererProcess, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.render(SAY)
    assert own.render([{"role": "user", "content": "next"}]) == "next"


_USE = """
import os, sys
from graphllm.chat import PROCESS, ChatTemplate
own = ChatTemplate("{{ messages[0].content }}", "test")
say = lambda text: own.render([{"role": "user", "content": text}])
assert say("a") == "a"
"""


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", _USE + code],
        capture_output=True, text=True, timeout=100, **options,
    )  # fmt: skip


def has_exited(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_process_ends_with_its_parent(end):
    done = run(f"print(PROCESS._process.pid, flush=True)\n{end}")
    assert done.stderr == "" and has_exited(int(done.stdout))


def test_a_forked_child_starts_its_own_process():
    code = """
pid = os.fork()
texts = [say(str(i)) for i in range(200)]
assert texts == [str(i) for i in range(200)], texts
print(PROCESS._process.pid, flush=True)
if not pid:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = run(code)
    pids = done.stdout.split()
    assert done.stderr == "" and len(pids) == 2 and pids[0] != pids[1]


@pytest.mark.parametrize(
    ("executable", "works"), [("None", True), ("'/bin/true'", True), ("'/no/such/program'", True)]
)
def test_a_program_that_embeds_python(executable, works):
    """If sys.executable is not an interpreter, the installed one is used."""
    done = run(f"PROCESS.close(); sys.executable = {executable}; print(say('b'))")
    assert (done.stdout, done.stderr) == ("b\n", "")


def test_without_an_interpreter_rendering_fails():
    code = """
PROCESS.close(); sys.executable = None; sys.prefix = sys.base_prefix = "/nowhere"
try: say("b")
except Exception as error: print(type(error).__name__, error)
"""
    done = run(code)
    assert done.stdout.startswith("RequestError chat templates are rendered in a separate process")
    assert "which cannot be started: /nowhere/bin/python" in done.stdout and done.stderr == ""


def test_jinja2_is_not_imported_by_the_main_process():
    done = run("say('x'); print('jinja2' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_closed_terminal_group_does_not_stop_the_process():
    """Ctrl-C at a terminal is sent to the whole process group."""
    code = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: None)
os.setpgid(0, 0)
first = PROCESS._process.pid
os.killpg(0, signal.SIGINT)
time.sleep(0.2)
assert say("b") == "b" and PROCESS._process.pid == first
"""
    assert run(code).stderr == ""


def test_built_in_templates_are_fast():
    own = ChatTemplate(TEMPLATES["gemma"], "test", TOKENS)
    own.render(SAY)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        own.render(SAY)
        times.append(time.perf_counter() - start)
    assert sorted(times)[10] < 0.05  # 0.5 ms on an idle machine
