"""Interleaved runs of `graphllm profile`, for `graphllm compare --against`.

Each run is a separate process, since times within one process share its memory placement. The order
is A B B A A B ..., so that a machine that slows down affects both sides alike.
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

_ROOT = Path(__file__).parents[3]  # the folder that graphllm is imported from
_START = "import sys; sys.path[0] = sys.argv.pop(1); from graphllm.cli import main; main()"


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: a graphllm checkout and the arguments of its `profile`."""

    name: str
    root: Path
    arguments: tuple[str, ...]


@contextmanager
def variants(arguments: Sequence[str], against: str) -> Iterator[tuple[Variant, Variant]]:
    """Yield both sides of a comparison, the baseline first.

    A commit is checked out for the duration of the context.

    Args:
        arguments: command line arguments of `profile`.
        against: ``backend=NAME``, ``commit=REV`` of the repository that graphllm runs from, or
            additional flags of `profile`.

    Raises:
        RequestError: ``against`` is invalid, or git failed.
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
    """Split ``text`` as a shell does; RequestError names ``flag``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(f"{flag} {text!r}: {error}") from None


@contextmanager
def _checkout(revision: str) -> Iterator[tuple[Path, str]]:
    """Check out a commit of the repository of graphllm; yield its folder and title."""
    try:
        top = _git("rev-parse", "--show-toplevel")
    except (OSError, RequestError):
        top = ""
    if not top or Path(top).resolve() != _ROOT.resolve():
        raise RequestError(
            f"--against commit={revision}: {_ROOT} is not a git checkout of graphllm"
        )
    try:
        commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except RequestError:
        raise RequestError(f"--against commit={revision}: {_ROOT} has no such commit") from None
    name = _git("log", "-1", "--format=commit %h, %s", commit)
    with TemporaryDirectory(prefix="graphllm-") as folder:
        root = Path(folder) / commit
        _git("worktree", "add", "--quiet", "--detach", str(root), commit)
        models = root / "graphllm" / "models"  # their place in an installation
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
    """Profile both sides ``pairs`` times, interleaved; return the files of each side.

    One more run of each side before warms the caches of files and kernels.

    Args:
        sides: the baseline and the variant.
        pairs: number of runs of each side.
        folder: folder for the profiles.
        show: progress callback.

    Raises:
        RequestError: a run failed.
    """
    total, done = 2 * (pairs + 1), 0
    files: tuple[list[Path], list[Path]] = ([], [])
    for turn in range(pairs + 1):
        for side in (0, 1) if turn % 2 else (1, 0):
            show("interleaved runs", done, total)
            path = folder / f"{'AB'[side]}{turn}.json"
            _profile(sides[side], path)
            done += 1
            if turn:
                files[side].append(path)
    show("interleaved runs", total, total)
    return files


def _profile(variant: Variant, path: Path) -> None:
    """Profile one variant in a process of its own; write the profile to ``path``."""
    arguments = [
        sys.executable,
        "-c",
        _START,
        str(variant.root),
        "profile",
        *variant.arguments,
        "-o",
        str(path),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = lines[-1].removeprefix("error: ").removeprefix("Error: ")
        raise RequestError(f"{variant.name}: {why}")
