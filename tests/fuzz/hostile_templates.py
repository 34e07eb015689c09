"""Templates that double a value or loop over a large one, with every operation of the sandbox.

    python tests/fuzz/hostile_templates.py [COUNT]

renders all of them, or the first COUNT, and prints the highest time and memory of one template. The
memory is that of the process, of which the interpreter and Jinja2 use about 20 MB.
"""

# ruff: noqa: E501

from __future__ import annotations

import random
import resource
import sys
import time
from collections import Counter

from graphllm.chat import PROCESS, ChatTemplate
from graphllm.chat.renderer.sandbox import TemplateEnvironment
from graphllm.errors import GraphllmError

FORMS = {
    "doubled": "{{% set n = namespace(x={small}) %}}{{% for i in range(60) %}}{{% set n.x = [{of}, n.x] %}}"
    "{{% set n.x = {of} %}}{{% set n.x = [n.x, n.x] %}}{{% endfor %}}{{{{ n.x }}}}",
    "repeated": "{{% set n = namespace(x={small}) %}}{{% for i in range(60) %}}{{% set n.x = {of} %}}"
    "{{% endfor %}}{{{{ n.x }}}}",
    "looped": "{{% set n = namespace(x={large}) %}}{{% for i in range(99999) %}}"
    "{{% set y = {of} %}}{{{{ y }}}}{{% endfor %}}",
    "kept": "{{% set n = namespace(x={large}, l=[]) %}}{{% for i in range(99999) %}}"
    "{{% set n.l = [{of}, n.l] %}}{{% endfor %}}",
}  # fmt: skip
VALUES = {  # (small value to double, large value to loop over)
    "text": ("'ab '", "'ab<1> ' * 1500000"),
    "list": ("[1, 'b']", "range(99999) | list"),
    "number": ("3", "7 ** 60000"),
    "mapping": ("{'a': 1}", "{'a': range(99999) | list, 'b': 'x' * 5000000}"),
}
OPERATORS = (
    "n.x + n.x", "n.x ~ n.x", "n.x * 2", "n.x * n.x", "n.x ** 2", "n.x % 7", "n.x // 3", "n.x / 3",
    "n.x - 1", "-n.x", "n.x == n.x ~ 1", "n.x < n.x", "n.x >= n.x", "n.x in [n.x]", "'zz' in n.x",
    "n.x not in n.x", "n.x[i:]", "n.x[::-1]", "n.x[1:-1]", "[n.x, n.x]", "(n.x, n.x)",
    "{'a': n.x, 'b': n.x}", "{n.x: 1}", "n.x if n.x else 1", "n.x and n.x", "not n.x",
    "namespace(a=n.x)", "dict(a=n.x)", "range(99999) | list", "cycler(n.x, n.x).next()",
    "joiner(n.x)()", "lipsum(99)", "'%s%s' % (n.x, n.x)", "'{0}{0}'.format(n.x)",
    "'%09999999d' % 3", "'{:>9999999}'.format(n.x)", "n.x.a", "n.x | string | length",
    "strftime_now(n.x | string)", "loop.changed(n.x)",
)  # fmt: skip
FILTER_ARGUMENTS = {
    "attr": "'a'", "batch": "2", "center": "9999999", "format": "n.x", "groupby": "0",
    "indent": "999", "join": "n.x | string", "map": "'string'", "replace": "'a', n.x | string",
    "rejectattr": "'a'", "selectattr": "'a'", "select": "'in', [n.x]", "reject": "'in', n.x",
    "slice": "9999", "truncate": "9", "wordwrap": "1", "default": "1", "d": "1", "int": "0, 16",
    "round": "2", "sum": "start=[]", "dictsort": "true", "tojson": "indent=99",
}  # fmt: skip
TEST_ARGUMENTS = {
    "divisibleby": "3", "in": "[n.x]", "sameas": "n.x", "eq": "n.x", "equalto": "n.x", "ne": "n.x",
    "lt": "n.x", "le": "n.x", "gt": "n.x", "ge": "n.x", "greaterthan": "1", "lessthan": "1",
    "==": "n.x", "!=": "n.x", "<": "n.x", ">": "n.x", "<=": "n.x", ">=": "n.x",
}  # fmt: skip
METHOD_ARGUMENTS = {
    "center": "9999999", "ljust": "9999999", "rjust": "9999999", "zfill": "9999999", "count": "'a'",
    "find": "'zz'", "rfind": "'zz'", "index": "'a'", "rindex": "'a'", "startswith": "n.x",
    "endswith": "n.x", "join": "[n.x, n.x]", "replace": "'a', n.x", "split": "'a'",
    "rsplit": "'a'", "partition": "'a'", "rpartition": "'a'", "removeprefix": "'a'",
    "removesuffix": "'a'", "translate": "{97: n.x}", "format": "n.x", "format_map": "{}",
    "maketrans": "n.x", "expandtabs": "99999999", "get": "'a'", "fromkeys": "n.x",
    "to_bytes": "99999999, 'big'",
}  # fmt: skip
REPORTED = {
    "slices that are kept": "{% set a='a'*9000000 %}{% set n=namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set n.l=[a[i:],n.l] %}{% endfor %}",
    "text of a list": "{% set n=namespace(l=[1]) %}{% for i in range(40) %}{% set n.l=[n.l,n.l] %}"
    "{% endfor %}{{ n.l | string }}",
    "hashes of tuples": "{% set n=namespace(t=(1,)) %}{% for i in range(60) %}{% set n.t=(n.t,n.t) %}"
    "{% endfor %}{{ {n.t: 1} }}",
    "case test": "{% set a='a'*9000000 %}{% for i in range(99999) %}{{ a is lower }}{% endfor %}",
    "x in list": "{% set l=range(99999)|list %}{% for i in range(99999) %}{{ -1 in l }}{% endfor %}",
    "select in": "{% set l=range(99999)|list %}{{ l | select('in', l) | list | length }}",
    "squares": "{% set n=namespace(x=3) %}{% for i in range(60) %}{% set n.x=n.x*n.x %}{% endfor %}",
    "remainders": "{% set a=7**90000 %}{% set b=3**90000 %}{% for i in range(99999) %}"
    "{% set c=a%b %}{% set d=a//b %}{% endfor %}",
    "int of a text": "{% set a='f'*9000000 %}{% for i in range(99) %}{{ a|int(0,16) % 7 }}{% endfor %}",
    "comparing": "{% set n=namespace(a=[1],b=[1]) %}{% for i in range(40) %}{% set n.a=[n.a,n.a] %}"
    "{% set n.b=[n.b,n.b] %}{% endfor %}{{ n.a == n.b }}",
    "sorting": "{% set n=namespace(a=[1],b=[1]) %}{% for i in range(40) %}{% set n.a=[n.a,n.a] %}"
    "{% set n.b=[n.b,n.b] %}{% endfor %}{{ [n.a, n.b] | sort }}",
    "compiling": "{{ 1 }}" * 37_000,
    "compiling nested": "{% if 1 %}" * 90 + "{{ " + "1+" * 60_000 + "1 }}" + "{% endif %}" * 90,
    "deep": "{% set n=namespace(t=(1,)) %}{% for i in range(99999) %}{% set n.t=(n.t,) %}{% endfor %}"
    "{% for i in range(99999) %}{% set n.t=(n.t,) %}{% endfor %}{{ {n.t: 1} }}",
}  # fmt: skip


def templates() -> dict[str, str]:
    """Return all hostile templates by name, those of reported cases first."""
    environment = TemplateEnvironment()
    made = dict(REPORTED)
    operations = [(operator, operator, VALUES) for operator in OPERATORS]
    for name in environment.filters:
        given = FILTER_ARGUMENTS.get(name, "")
        operations.append((f"filter {name}", f"n.x | {name}({given})", ("text", "list")))
    for name in environment.tests:
        given = TEST_ARGUMENTS.get(name, "")
        expression = f"[n.x] | select('{name}'{', ' + given if given else ''}) | list"
        operations.append((f"test {name}", expression, ("text",)))
    for value, kind in (("text", str), ("list", list), ("mapping", dict), ("number", int)):
        for name in dir(kind):
            if not name.startswith("_"):
                given = METHOD_ARGUMENTS.get(name, "")
                operations.append((f"{kind.__name__}.{name}", f"n.x.{name}({given})", (value,)))
    for name, expression, values in operations:
        for value in values:
            small, large = VALUES[value]
            for form, text in FORMS.items():
                source = text.format(small=small, large=large, of=expression)
                made[f"{name}, {value}, {form}"] = source
    return made


def render(source: str) -> str:
    """Render the template; return its error or the length of its text."""
    try:
        return f"{len(ChatTemplate(source, 'hostile').render([{'role': 'user', 'content': 'x'}]))}"
    except GraphllmError as error:
        return str(error)


def cpu_s() -> float:
    """Return the CPU time in seconds of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    every = templates()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else len(every)
    names = [
        *REPORTED,
        *random.Random(0).sample([*every][len(REPORTED) :], len(every) - len(REPORTED)),
    ]
    slowest, most, ends = (0.0, ""), (0.0, ""), Counter[str]()
    for name in names[:count]:
        PROCESS.close()
        before, start = cpu_s(), time.perf_counter()
        end = render(every[name])
        wall = time.perf_counter() - start
        PROCESS.close()
        slowest, most = max(slowest, (wall, name)), max(most, (cpu_s() - before, name))
        ends[
            end[:45] if "more than" in end else end.split(":")[1].strip() if ":" in end else "text"
        ] += 1
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{count} of {len(every)} templates: at most {slowest[0]:.2f} s ({slowest[1]}), of CPU "
          f"{most[0]:.2f} s ({most[1]}) with the start of the process, {memory:.0f} MB")  # fmt: skip
    for end, times in ends.most_common(12):
        print(f"{times:6} {end}")
