"""Runs of `graphllm profile` in turns, for `graphllm compare --against`.

Each run is a process of its own: two plans in one process would share its luck with memory. The
order is A B B A A B ..., so that a machine that grows slower takes as much from both sides.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ...errors import RequestError

Show = Callable[[str, int, int], None]  # what, done, total

_ROOT = Path(__file__).parents[3]  # where this graphllm is imported from
_START = "import sys; sys.path[0] = sys.argv.pop(1); from graphllm.cli import main; main()"


@dataclass(frozen=True)
class Variant:
    """One side: a graphllm, and what its `profile` is asked for."""

    name: str
    root: Path
    arguments: tuple[str, ...]


@contextmanager
def variants(arguments: Sequence[str], against: str) -> Iterator[tuple[Variant, Variant]]:
    """What is compared, the baseline first. ``arguments``: of the command line of `profile`.

    ``against``: ``backend=NAME``, ``commit=REV`` of the repository that graphllm runs from, or
    other flags of `profile`. The commit is there as long as the context. RequestError.
    """
    kind, _, value = against.partition("=")
    given = tuple(arguments)
    own = Variant(f"profile {shlex.join(given)}", _ROOT, given)
    if kind == "commit" and value:
        with _checkout(value) as (root, name):
            yield Variant(name, root, given), Variant(f"this tree, {_ROOT}", _ROOT, given)
        return
    if kind == "backend" and value:
        more = ["--device", value]
    elif against.startswith("-"):
        more = split_arguments("--against", against)
    else:
        raise RequestError(
            f"--against {against!r} must be backend=NAME, commit=REV or flags of profile"
        )
    other = (*given, *more)
    yield Variant(f"profile {shlex.join(other)}", _ROOT, other), own


def split_arguments(flag: str, text: str) -> list[str]:
    """Words as a shell takes them. RequestError names the flag."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(f"{flag} {text!r}: {error}") from None


@contextmanager
def _checkout(revision: str) -> Iterator[tuple[Path, str]]:
    """A folder with that commit of graphllm's own repository, and what the commit is called."""
    try:
        top = _git("rev-parse", "--show-toplevel")
    except (OSError, RequestError):
        top = ""
    if not top or Path(top).resolve() != _ROOT.resolve():
        raise RequestError(f"--against commit={revision}: {_ROOT} is no git checkout of graphllm")
    try:
        commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except RequestError:
        raise RequestError(f"--against commit={revision}: {_ROOT} has no such commit") from None
    name = _git("log", "-1", "--format=commit %h, %s", commit)
    with TemporaryDirectory(prefix="graphllm-") as folder:
        root = Path(folder) / commit
        _git("worktree", "add", "--quiet", "--detach", str(root), commit)
        models = root / "graphllm" / "models"  # where an installation has them
        if (root / "models").is_dir() and not models.exists():
            models.symlink_to(root / "models")
        try:
            yield root, name
        finally:
            _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RequestError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def run_interleaved(
    sides: tuple[Variant, Variant], pairs: int, folder: Path, show: Show
) -> tuple[list[Path], list[Path]]:
    """Profile both ``pairs`` times in turns; the files of each side. RequestError of a run.

    Before that each is run once for the caches of files and kernels.
    """
    total, done = 2 * (pairs + 1), 0
    files: tuple[list[Path], list[Path]] = ([], [])
    for turn in range(pairs + 1):
        for side in (0, 1) if turn % 2 else (1, 0):
            show("runs in turns", done, total)
            path = folder / f"{'AB'[side]}{turn}.json"
            _profile(sides[side], path)
            done += 1
            if turn:
                files[side].append(path)
    show("runs in turns", total, total)
    return files


def _profile(way: Variant, path: Path) -> None:
    arguments = [
        sys.executable,
        "-c",
        _START,
        str(way.root),
        "profile",
        *way.arguments,
        "-o",
        str(path),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = said[-1].removeprefix("error: ").removeprefix("Error: ")
        raise RequestError(f"{way.name}: {why}")
