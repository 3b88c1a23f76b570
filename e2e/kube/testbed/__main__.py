"""Runs test clusters and the tests on them.

python -m testbed build                    # builds and caches Kubernetes
python -m testbed up [--no-node] [...]     # starts a cluster; Ctrl-C removes it
python -m testbed test [PYTEST_ARGUMENT...]
python -m testbed down                     # removes what a killed run left, if its reaper was killed too
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from testbed.cleanup import clean, find_leftovers
from testbed.cluster import run_testbed
from testbed.errors import TestbedError
from testbed.kubernetes_choice import build_chosen
from testbed.packages import install_packages
from testbed.settings import ROOT, Ports, Settings, make_settings

TESTS = Path(__file__).parents[1]
# Several times what they take on two quiet cores.
LIMIT_S = 4500.0


@click.group()
def main() -> None:
    """Runs test clusters and the tests on them."""


@main.command("build")
def build_command() -> None:
    """Builds Kubernetes and its tools, unless they are cached."""
    print(build_chosen())


@main.command()
@click.option("--node/--no-node", default=True, help="Make this machine a node (needs root).")
@click.option("--fake-nodes", default=2, show_default=True, help="Number of nodes that kwok plays.")
@click.option("--port", type=int, help="First of eleven consecutive ports.")
def up(*, node: bool, fake_nodes: int, port: int | None) -> None:
    """Starts a cluster and keeps it until Ctrl-C."""
    settings = make_settings(first_port=port, num_fake_nodes=fake_nodes, has_real_node=node)
    # SIGTERM ends the program through the blocks that clean up, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with run_testbed(settings) as testbed:
            print(testbed.client.kubectl("get", "nodes"))
            print(
                f"export KUBECONFIG={testbed.client.kubeconfig} PATH={testbed.path}:$PATH\nCtrl-C stops it", flush=True
            )
            signal.pause()
    except KeyboardInterrupt:
        print("stopped")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test(arguments: tuple[str, ...]) -> None:
    """Runs the tests. The last line counts what passed, failed and was skipped.

    Without arguments two clusters run side by side: one makes this machine a node, one has nodes that kwok plays.
    """
    from limited_runs import Counts, end_steps_with_this_process, run_pytest, run_side_by_side  # noqa: PLC0415 - .ci, which only `make` names

    def run_half(half: str, **options: Any) -> Counts:
        return run_pytest(["--durations=5", f"--nodes={half}", str(TESTS)], limit_s=LIMIT_S, folder=ROOT, **options)

    end_steps_with_this_process()
    settings = [make_settings()]
    try:
        install_packages()
        build_chosen()
        if arguments:
            counts = run_pytest(["--durations=5", *arguments], limit_s=LIMIT_S, folder=ROOT)
        else:
            settings.append(_settings_of_played_nodes(settings[0]))
            place = {"SLUICE_KUBE_FOLDER": str(settings[1].folder), "SLUICE_KUBE_PORT": str(settings[1].ports.api)}
            counts = run_side_by_side(
                [lambda: run_half("real")],
                [lambda: run_half("played", environment=place, name="tests with played nodes")],
            )
    except TestbedError as error:
        print(f"testbed: {error}")
        counts = Counts(failed=1)
    leftovers = [leftover for one in settings for leftover in find_leftovers(one)]
    for leftover in leftovers:
        print(f"left behind: {leftover}")
    counts.failed += bool(leftovers)
    counts.print_with_reasons("e2e-k8s: ")
    sys.exit(1 if counts.failed else 0)


def _settings_of_played_nodes(first: Settings) -> Settings:
    """The cluster without a real node that runs beside another one."""
    return make_settings(
        folder=first.folder.with_name("kube-played"), first_port=first.ports.api + 20, has_real_node=False
    )


@main.command()
def down() -> None:
    """Removes what a killed run left."""
    for settings in (first := make_settings(), _settings_of_played_nodes(first)):
        clean(settings)


@main.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("port", type=int)
def reap(folder: Path, port: int) -> None:
    """Waits for the end of standard input, then cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the end of its parent ends it
    sys.stdin.buffer.read()
    clean(Settings(folder=folder, address="", ports=Ports.starting_at(port)))


if __name__ == "__main__":
    try:
        main()
    except TestbedError as error:
        sys.exit(f"testbed: {error}")
