"""Architecture rules: direction of imports, no cycles, sizes of files and functions, links."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import typer
from tiers import BY_FORMAT, QUICK_EVERY

from graphllm import models, ops
from graphllm.backends.order import ORDER
from graphllm.cli import app

ROOT = Path(__file__).parents[2]
CORE = sorted(
    [
        *(ROOT / "graphllm" / "graph").glob("*.py"),
        *(ROOT / "graphllm" / "compiler").glob("*.py"),
        *(ROOT / "graphllm" / "runtime").glob("*.py"),
        ROOT / "graphllm" / "ops" / "__init__.py",
        ROOT / "graphllm" / "backends" / "__init__.py",
        ROOT / "graphllm" / "backends" / "contract.py",
    ]
)
SOURCES = sorted([*(ROOT / "graphllm").rglob("*.py"), *(ROOT / "models").rglob("*.py")])
CORE_LINES, FILE_LINES, FUNCTION_LINES, LONG_FUNCTIONS = 2500, 400, 60, 40
MODEL_LINES = 60

# Identifiers that are an op's or a backend's name and something else, too: what the core means.
OTHER_MEANINGS = {
    "add": "set.add",
    "linear": "Options.linear, which a user sets",
    "reference": "OpDef.reference, the NumPy body",
    "contiguous": "a layout",
}
TEXTS_TOO = {"contiguous", "attention"}  # a layout and a kind of arithmetic, also in quotes


def repo_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree. The tests of a file share them."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


def docstrings(path: Path) -> set[ast.AST]:
    """The nodes that are texts standing alone."""
    return {n.value for n in nodes(path) if isinstance(n, ast.Expr)}


def words(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(identifier or text, line, whether it is a text) of all code but the docstrings."""
    skipped = docstrings(path)
    for node in nodes(path):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in skipped:
                yield node.value, line, True
        elif isinstance(node, ast.Name):
            yield node.id, line, False
        elif isinstance(node, ast.Attribute):
            yield node.attr, line, False
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg, line, False
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, line, False
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.name.rpartition(".")[2], line, False


def test_the_core_names_no_op_no_model_and_no_backend():
    """By an identifier, or in a text as a whole word."""
    model_names = {n for s in models.specs() for n in (*s.types, *s.gguf)}
    known = set(ops.registry()) | model_names | set(ORDER) | {"cuda", "numba", "cupy"}
    found = []
    for path, (word, line, is_text) in ((file, each) for file in CORE for each in words(file)):
        parts = re.findall(r"\w+", word) if is_text else [word]
        whole = {word} | {p for p in parts if p in model_names | set(ORDER)}
        allowed = TEXTS_TOO if is_text else OTHER_MEANINGS.keys()
        named = (whole & known) - allowed
        found += [f"{repo_path(path)}:{line}: {w}" for w in sorted(named)]
    assert not found, found


def test_the_core_imports_no_accelerator():
    for path, node in ((file, node) for file in CORE for node in nodes(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        wrong = {n.split(".")[0] for n in names} & {"torch", "cupy", "numba", "llvmlite"}
        assert not wrong, f"{repo_path(path)}:{node.lineno}: {wrong}"


# ------------------------------------------------------------------------------------------ imports

# Packages and root modules of graphllm, lowest first. A module may import from its own package and
# from those before it. Imports inside functions and under TYPE_CHECKING count.
IMPORT_ORDER = (
    "errors", "atomic_file", "version", "terminal", "progress", "env", "debug", "cache",
    "arguments", "system_info", "html",
    "graph",  # tensors, op declarations, rewriting
    "formats",  # block formats
    "ops",
    "backends",  # contract, reference, cpu, cuda
    "compiler",  # placement, fusion, memory, plan
    "weights",  # files of tensors
    "runtime",  # executor, decode loop, GPU offload
    "tokenizer",
    "model",  # configuration, decoder, modules
    "models",  # one file per model architecture
    "engine",  # requests, KV cache, generation
    "chat",
    "checkpoints",  # model files: GGUF, Hugging Face directories
    "quantize",  # writes GGUF files and compressed-tensors directories
    "loading",
    "quality",  # perplexity, divergence from another model
    "profiler",
    "embedding",  # encoders and pooling
    "api",
    "validation",
    "server",  # HTTP server
    "cli",
)  # fmt: skip
# Modules whose imports are checked by no order: the public names and ``python -m graphllm``.
ENTRY_POINTS = {"graphllm", "graphllm.__main__"}
# Cycles that are allowed, as sets of modules, each with its reason.
CYCLES: dict[frozenset[str], str] = {}


def module_name(path: Path) -> str:
    """The name under which a source file is imported; models/ is the package graphllm.models."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "graphllm" else ("graphllm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@cache
def imports(name: str) -> list[tuple[str, int]]:
    """(module of graphllm, line) of every import statement of a module."""
    path, every = MODULES[name], []
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in nodes(path):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            named = [f"{module}.{alias.name}" for alias in node.names]
            found = [full if full in MODULES else module for full in named]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        every += [(each, node.lineno) for each in found if each in MODULES and each != name]
    return every


def level(name: str) -> int:
    return IMPORT_ORDER.index(name.split(".")[1])


def goes_up(name: str, to: str) -> bool:
    if to in ENTRY_POINTS:
        return to != "graphllm"
    return level(to) > level(name)


def test_imports_go_down():
    checked = sorted(MODULES.keys() - ENTRY_POINTS)
    assert len(checked) > 100
    upward = [
        f"{repo_path(MODULES[name])}:{line} imports {to}"
        for name in checked
        for to, line in imports(name)
        if goes_up(name, to)
    ]
    assert not upward, upward


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_modules_have_no_import_cycles():
    graph = {name: {to for to, _ in imports(name)} for name in MODULES}
    found = {frozenset(each) for each in cycles(graph)}
    assert found == CYCLES.keys(), [sorted(each) for each in found ^ CYCLES.keys()]


# -------------------------------------------------------------------------------------------- sizes


def code_lines(path: Path) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    alone = docstrings(path)
    texts = {
        line
        for node in nodes(path)
        if node in alone and isinstance(node, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in (*skip, tokenize.ENDMARKER):
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def test_the_core_is_small():
    assert len(CORE) >= 7
    assert sum(map(code_lines, CORE)) <= CORE_LINES


# Files that may call `id`, each with the reason. An id names an object only while something holds
# the object; afterwards it may name another one. Nodes, rows and plans are keys themselves.
IDS: dict[str, str] = {}


def test_no_table_is_keyed_by_the_id_of_an_object():
    for path in SOURCES:
        used = [n for n in nodes(path) if isinstance(n, ast.Name) and n.id == "id"]
        lines = [n.lineno for n in used if isinstance(n.ctx, ast.Load)]
        assert not lines or repo_path(path) in IDS, f"{repo_path(path)}: {lines}"
        assert lines or repo_path(path) not in IDS, f"{repo_path(path)}: out of date"


MODELS = sorted((ROOT / "models").glob("[a-z]*.py"))


def test_a_model_file_is_small():
    assert len(MODELS) > 10
    lines = {repo_path(path): code_lines(path) for path in MODELS}
    assert not {name: count for name, count in lines.items() if count > MODEL_LINES}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of every function, nested ones included."""
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = node.body[0] if ast.get_docstring(node) else None
            first = (text.end_lineno or 0) - text.lineno + 1 if text else 0
            yield f"{repo_path(path)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1 - first


def test_files_and_functions_are_short():
    lines = {repo_path(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > FILE_LINES}
    assert not [f for path in SOURCES for f in functions(path) if f[1] > FUNCTION_LINES]


def unannotated(path: Path) -> list[str]:
    """Functions of a file with a parameter (but self and cls) or a result without annotation."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            a = node.args
            every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            bare = [x for x in every if not x.annotation and x.arg not in ("self", "__self", "cls")]
            if bare or (node.returns is None and node.name != "__init__"):
                found.append(node.name)
    return found


def test_only_modules_with_compiled_functions_lack_annotations():
    """The exceptions of mypy's disallow_untyped_defs are those modules and no others."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config.getboolean("mypy", "disallow_untyped_defs")
    exempt = {
        name.strip()
        for section in config.sections()
        if config.get(section, "disallow_untyped_defs", fallback="") == "False"
        for name in section.removeprefix("mypy-").split(",")
    }
    assert exempt == {name for name, path in MODULES.items() if unannotated(path)}
    assert all(name.startswith("graphllm.backends.cpu.") for name in exempt)


def test_importing_is_light():
    """Nothing but the standard library, and little of it."""
    code = "import sys; old = set(sys.modules); import graphllm; print(*set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heads = {name.split(".")[0] for name in done.stdout.split()}
    assert "graphllm" in heads and heads - {"graphllm"} <= set(sys.stdlib_module_names)


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_links_resolve():
    """Links to files, and paths of this repository that are named as code."""
    found = 0
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        paths = [page.parent / target for target in links if "://" not in target]
        named = re.findall(r"`((?:graphllm|models|tests|docs|benchmarks)/[\w/.]*)`", text)
        paths += [ROOT / name for name in named]
        found += len(paths)
        missing = [str(path) for path in paths if not path.exists()]
        assert not missing, f"{repo_path(page)}: {missing}"
    assert found > 100


def test_every_variable_is_in_the_table():
    used = set()
    for folder in ("graphllm", "models", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"GRAPHLLM_[A-Z_]+", path.read_text("utf-8")))
    used.discard("GRAPHLLM_")  # this test's own pattern
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert used == set(re.findall(r"^\| `(GRAPHLLM_[A-Z_]+)` \|", page, re.MULTILINE))
    assert len(used) <= 10
    readers = {p for p in SOURCES if re.search(r"environ.*GRAPHLLM_", p.read_text("utf-8"))}
    assert readers == {ROOT / "graphllm" / "env.py"}


def test_setup_lists_every_package():
    """A wheel has only the packages that setup.cfg lists; an editable install has all."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "graphllm").rglob("*.py")}
    found = {".".join(folder.parts) for folder in packages} | {"graphllm.models"}
    assert found == set(setup["options"]["packages"].split())


def test_every_flag_is_in_the_reference():
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page))
    for verb, command in typer.main.get_command(app).commands.items():
        for flag in command.params:
            names = {name for name in (*flag.opts, *flag.secondary_opts) if name.startswith("-")}
            assert names <= listed, f"{verb}: {sorted(names - listed)}"


def test_the_readme_shows_the_model_file():
    """Its example is models/qwen3.py without TINY."""
    page = (ROOT / "README.md").read_text("utf-8")
    section = page.split("\n## A model is a short file\n")[1]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    lines = (ROOT / "models" / "qwen3.py").read_text("utf-8").splitlines()
    assert example and set(example.group(1).splitlines()) <= set(lines)


def test_the_tiers_name_tests_that_exist():
    for name in [*QUICK_EVERY, *BY_FORMAT]:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / path).read_text("utf-8"), name


if __name__ == "__main__":  # what is long, but allowed
    print(f"core: {sum(map(code_lines, CORE))} lines of code")
    for path in SOURCES:
        for name, lines in functions(path):
            if lines > LONG_FUNCTIONS:
                print(f"{name}: {lines} lines")
