"""Tests the mutants of one part, in a process of its own: ``mutate.py`` starts it."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.mutation.fork_server import ForkServer, TestRun, find_functions
from benchmarks.mutation.mutants import Mutant, MutatedModule
from benchmarks.mutation.results import NOTICED, Outcome, Part, Result, ResultFile, read_equivalent, read_parts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FunctionType

    Functions = dict[tuple[str, str, int], list[FunctionType]]

PROGRESS_S = 20.0


class PartRun:
    """One run over a part's mutants.

    Args:
        part: What is mutated, and by which tests that shall be noticed.
        root: The repository.
        folder: Keeps what is found.
        equivalent: Keys of listed mutants.
        options: The command line.
    """

    def __init__(
        self,
        part: Part,
        root: Path,
        folder: Path,
        equivalent: Iterable[tuple[str, str, str]],
        options: argparse.Namespace,
    ) -> None:
        self._part = part
        self._root = root
        self._folder = folder
        self._equivalent = frozenset(equivalent)
        self._options = options
        paths = [str(path.relative_to(root)) for path in part.list_modules(root)]
        self._modules = {path: MutatedModule(root, path) for path in paths}
        self._results = ResultFile(folder / "results.jsonl")
        self._runs: dict[str, TestRun] = {}
        # By file and line, the tests that run it.
        self._tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        # How many mutants of a function each test noticed, and which tests pass when they run alone.
        self._kills: dict[str, Counter[str]] = defaultdict(Counter)
        self._passes_alone: set[str] = set()
        # Of a test its text, of a file its content.
        self._hashes: dict[str, str] = {}
        self._files: dict[str, str] = {}

    def work(self, server: ForkServer) -> None:
        """Measures the tests, and tests the mutants that no earlier run has settled."""
        files = [module.file for module in self._modules.values()]
        # What libraries warn of when they are imported is their own affair.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for file in files:
                _import_file(file)
        functions = find_functions(files)
        self._measure(server)
        mutants = [mutant for module in self._modules.values() for mutant in module.mutants]
        self._results.keep({mutant.identity for mutant in mutants})
        drawn = draw_sample(mutants, self._options)
        changed = _list_changed_lines(self._root, self._options.since) if self._options.since else None
        pending = [
            mutant
            for mutant in mutants
            if mutant.identity in drawn
            and not self._is_settled(mutant)
            and (self._options.module is None or self._options.module in mutant.path)
            and (self._options.function is None or self._options.function in mutant.function)
            and (changed is None or changed.get(mutant.path, set()) & set(range(mutant.lines[0], mutant.lines[1] + 1)))
        ]
        self._say(f"{len(mutants)} mutants, {len(pending)} to test")
        said_s = time.monotonic()
        for number, mutant in enumerate(pending):
            result = self._test(server, mutant, functions)
            self._results.add(result)
            if result.outcome in {Outcome.UNNOTICED, Outcome.UNCOVERED} and mutant.key not in self._equivalent:
                self._say(f"{result.outcome}: {mutant.path}:{mutant.lines[0]} {mutant.before}  ->  {mutant.after}")
            if time.monotonic() > said_s + PROGRESS_S:
                said_s = time.monotonic()
                self._say(f"{number + 1} of {len(pending)} tested")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{self._part.name}: {text}\n")
        sys.stderr.flush()

    def _measure(self, server: ForkServer) -> None:
        """Runs the tests without a mutant, only those whose file has changed since they were measured."""
        path = self._folder / "tests.json"
        folders = {item.path.parent for item in server.items.values()}
        helpers = [file for folder in folders for file in folder.glob("*.py") if not file.name.startswith("test_")]
        common = _hash_files([*helpers, *(module.file for module in self._modules.values())])
        known = json.loads(path.read_text()) if path.exists() else {}
        for nodeid, item in server.items.items():
            file = self._files[nodeid] = str(item.path)
            if file not in self._hashes:
                self._hashes[file] = _hash_files([item.path])
            self._hashes[nodeid] = common + self._hashes[file]
        new = [nodeid for nodeid in server.items if known.get(nodeid, {}).get("hash") != self._hashes[nodeid]]
        if new:
            self._say(f"measuring {len(new)} of {len(server.items)} tests")
            files = [module.file for module in self._modules.values()]
            measured = server.measure(new, files, self._folder / "measured.json")
            known |= {nodeid: {"hash": self._hashes[nodeid], "run": asdict(run)} for nodeid, run in measured.items()}
        known = {nodeid: known[nodeid] for nodeid in server.items}
        path.write_text(json.dumps(known))
        self._runs = {nodeid: TestRun(**each["run"]) for nodeid, each in known.items()}
        unusable = [nodeid for nodeid, run in self._runs.items() if not run.is_usable]
        for nodeid in unusable:
            self._say(f"fails or is skipped without a mutant, so it is left out: {nodeid}")
        for nodeid, run in self._runs.items():
            if run.is_usable:
                for file, lines in run.lines.items():
                    for line in lines:
                        self._tests[file][line].add(nodeid)
        self._hashes |= {nodeid: _hash_test(item) for nodeid, item in server.items.items()}

    def _is_settled(self, mutant: Mutant) -> bool:
        """Whether an earlier run's result still holds: the function and the tests that count are the same."""
        result = self._results.results.get(mutant.identity)
        if result is None or self._options.anew:
            return False
        if result.outcome is Outcome.SAME:
            return True
        if result.outcome in NOTICED:
            self._kills[mutant.function][result.killer] += 1
            return self._hashes.get(result.killer) == result.tests
        return result.tests == self._hash_tests(self._choose_tests(mutant))

    def _hash_tests(self, nodeids: list[str]) -> str:
        hashes = sorted({self._hashes[self._files[nodeid]] for nodeid in nodeids})
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]

    def _choose_tests(self, mutant: Mutant) -> list[str]:
        """Chooses tests that run a mutant's lines: those that noticed others of its function first, then quick ones."""
        by_line = self._tests[str(self._root / mutant.path)]
        found = {nodeid for line in range(mutant.lines[0], mutant.lines[1] + 1) for nodeid in by_line.get(line, ())}
        kills, numbers, costs = self._kills[mutant.function], Counter[str](), {}
        # The n-th case of a test counts for n of its cost: hundreds of cases of one would use up the budget.
        for nodeid in sorted(found, key=lambda nodeid: (self._runs[nodeid].cpu_s, nodeid)):
            test = nodeid.partition("[")[0]
            numbers[test] += 1
            costs[nodeid] = numbers[test] * self._runs[nodeid].cpu_s
        return sorted(found, key=lambda nodeid: (-kills[nodeid], costs[nodeid], nodeid))

    def _limit_tests(self, nodeids: list[str]) -> list[str]:
        kept: list[str] = []
        total_s = 0.0
        for nodeid in nodeids:
            total_s += self._runs[nodeid].cpu_s
            if kept and total_s > self._options.budget:
                break
            kept.append(nodeid)
        return kept

    def _test(self, server: ForkServer, mutant: Mutant, functions: Functions) -> Result:
        compiled = self._modules[mutant.path].compile(mutant.identity)
        if compiled is None:
            return Result(mutant.identity, Outcome.SAME, "")
        before, after = compiled
        changed = [
            (function, after)
            for function in functions.get((before.co_filename, before.co_qualname, before.co_firstlineno), ())
        ]
        if not changed:
            raise RuntimeError(f"{mutant.path}: {mutant.function} is no function that runs")
        chosen = self._choose_tests(mutant)
        while nodeids := self._limit_tests(chosen):
            verdict = server.run(nodeids, self._runs, changed)
            killer = verdict.killer
            if killer is None:
                return Result(mutant.identity, Outcome.UNNOTICED, self._hash_tests(chosen))
            if self._can_judge(server, killer):
                self._kills[mutant.function][killer] += 1
                outcome = Outcome.TIMED_OUT if verdict.has_timed_out else Outcome.NOTICED
                return Result(mutant.identity, outcome, self._hashes[killer], killer)
            chosen.remove(killer)
        return Result(mutant.identity, Outcome.UNCOVERED, self._hash_tests(chosen))

    def _can_judge(self, server: ForkServer, nodeid: str) -> bool:
        """Whether a test passes alone without a mutant: one that needs other tests before it notices nothing."""
        if nodeid not in self._passes_alone:
            if server.run([nodeid], self._runs, ()).killer is not None:
                self._say(f"fails without a mutant when it runs alone, so it is left out: {nodeid}")
                for lines in self._tests.values():
                    for tests in lines.values():
                        tests.discard(nodeid)
                return False
            self._passes_alone.add(nodeid)
        return True


def draw_sample(mutants: Iterable[Mutant], options: argparse.Namespace) -> set[str]:
    """Draws the identities of ``options.sample`` mutants at random, by the seed ``options.draw``; all without."""
    identities = sorted({mutant.identity for mutant in mutants})
    if options.sample is None or options.sample >= len(identities):
        return set(identities)
    return set(random.Random(options.draw).sample(identities, options.sample))


def _import_file(file: Path) -> None:
    """Imports a module of a part, and makes sure that it is this one.

    Raises:
        RuntimeError: Another copy is imported in its place.
    """
    package = file.parent
    parts = [file.stem] if file.stem != "__init__" else []
    while (package / "__init__.py").exists():
        parts.insert(0, package.name)
        package = package.parent
    module = importlib.import_module(".".join(parts))
    if Path(module.__file__ or "").resolve() != file.resolve():
        raise RuntimeError(f"{module.__name__} is imported from {module.__file__}, not from {file}")


def _hash_files(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in sorted(files):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _hash_test(item: pytest.Item) -> str:
    """Hashes a test's own text, its parameters included."""
    source = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
    return hashlib.sha256(f"{item.nodeid} {source}".encode()).hexdigest()[:16]


def _list_changed_lines(root: Path, revision: str) -> dict[str, set[int]]:
    """Lists the lines that were added or changed since a revision, by file."""
    command = ["git", "diff", "--unified=0", "--no-color", "--relative", revision]
    diff = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    changed: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif line.startswith("@@ "):
            first, _, count = line.split("+", 1)[1].split(" ", 1)[0].partition(",")
            changed[path] |= set(range(int(first), int(first) + int(count or 1)))
    return changed


def main() -> int:
    """Runs one part; returns pytest's exit status."""
    parser = make_parser()
    parser.add_argument("part")
    options = parser.parse_args()
    part = read_parts(options.parts)[options.part]
    root = options.root.resolve()
    folder = options.folder / part.name
    folder.mkdir(parents=True, exist_ok=True)
    os.nice(19)
    os.chdir(root)
    run = PartRun(part, root, folder.resolve(), read_equivalent(options.equivalent, part.name), options)
    arguments = [
        *(str(root / each) for each in part.tests),
        *(f"--deselect={each}" for each in part.deselect),
        "-m",
        "not engine",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-s",
        "-qq",
        f"--basetemp={folder / 'tmp'}",
    ]
    return int(pytest.main(arguments, plugins=[ForkServer(run.work)]))


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of what ``mutate.py`` passes on."""
    here = Path(__file__)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--module", metavar="PATH", help="only files whose path contains this")
    parser.add_argument("--function", help="only functions whose name contains this, as module.Class.method")
    parser.add_argument("--since", metavar="REV", help="only lines that differ from this revision")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of a part, drawn at random")
    parser.add_argument("--draw", type=int, default=1, metavar="SEED", help="which mutants a sample has")
    parser.add_argument("--anew", action="store_true", help="test all again, not only what changed")
    parser.add_argument(
        "--budget",
        type=float,
        default=20.0,
        help="tests of one mutant may take as many seconds of CPU without a mutant",
    )
    parser.add_argument("--parts", type=Path, default=here.with_name("parts.toml"), help="the table of parts")
    parser.add_argument(
        "--equivalent", type=Path, default=here.with_name("equivalent.toml"), help="mutants that nothing can notice"
    )
    parser.add_argument("--root", type=Path, default=here.parents[2], help="the repository")
    parser.add_argument(
        "--folder", type=Path, default=here.parents[2] / "build" / "mutation", help="keeps what is found"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
