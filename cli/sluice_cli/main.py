"""The ``sluice`` command."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import click

from sluice_cli.commands.demo import Demo, DemoError
from sluice_cli.commands.down import stop_cluster
from sluice_cli.commands.explain import UnknownRequestError, fetch_story, make_story
from sluice_cli.commands.plan import plan
from sluice_cli.commands.simulate import simulate
from sluice_cli.commands.status import read_view
from sluice_cli.commands.up import UpOptions, read_manifest, run_up
from sluice_cli.local_cluster.cluster_directory import HOME, AlreadyRunningError, ClusterDirectory, find_clusters
from sluice_cli.local_cluster.detached_start import start_detached
from sluice_cli.output.cluster_display import Display, make_console
from sluice_cli.output.cluster_view import make_curl_line, make_table
from sluice_cli.processes.ports import PortBook, PortError
from sluice_operator.api.manifest import ManifestError


class CommandError(click.ClickException):
    """Something the user can set right; the message says how."""


def _parse_directories(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, Path]:
    directories = {}
    for value in values:
        name, separator, directory = value.partition("=")
        if not separator or not name or not directory:
            raise click.BadParameter(f"{value!r} is not NAME=DIR")
        directories[name] = Path(directory)
    return directories


def _parse_ports(_context: click.Context, _parameter: click.Parameter, value: str) -> range:
    low, separator, high = value.partition("-")
    if not separator or not low.isdigit() or not high.isdigit() or not 1024 <= int(low) < int(high) <= 32767:
        raise click.BadParameter(f"{value!r} is not LOW-HIGH with 1024 <= LOW < HIGH <= 32767")
    return range(int(low), int(high) + 1)


def _choose_cluster(name: str | None) -> ClusterDirectory:
    """The cluster meant by an optional name: the only one that runs."""
    clusters = find_clusters()
    if name:
        chosen = [cluster for cluster in clusters if cluster.name == name]
        if not chosen:
            raise CommandError(f"no cluster {name!r} in {HOME.absolute()}")
        return chosen[0]
    running = [cluster for cluster in clusters if cluster.is_running()]
    if len(running) != 1:
        names = ", ".join(cluster.name for cluster in running) or "none"
        raise CommandError(f"one cluster must run, or be named with --cluster; running in {HOME.absolute()}: {names}")
    return running[0]


cluster_option = click.option("--cluster", "name", help="Name of the cluster; the only running one when absent.")

ports_option = click.option(
    "--port-range",
    "ports",
    default="20000-32767",
    show_default=True,
    envvar="SLUICE_PORT_RANGE",
    callback=_parse_ports,
    help="Ports to choose from.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice-serve", prog_name="sluice")
def cli() -> None:
    """Serves large language models under latency objectives."""


@cli.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-d", "--detach", is_flag=True, help="Return once the cluster serves.")
@click.option(
    "--http-port", type=click.IntRange(1024, 65535), help="Port of the first router instead of the manifest's."
)
@click.option(
    "--volume", "volumes", multiple=True, callback=_parse_directories, metavar="NAME=DIR", help="Directory of a claim."
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    callback=_parse_directories,
    metavar="NAME=DIR",
    help="Directory of a Secret's entries.",
)
@ports_option
def up(
    manifest: Path,
    *,
    detach: bool,
    http_port: int | None,
    volumes: dict[str, Path],
    secrets: dict[str, Path],
    ports: range,
) -> None:
    """Runs the ServingCluster of MANIFEST as local processes, and follows its edits."""
    options = UpOptions(manifest=manifest, http_port=http_port, volumes=volumes, secrets=secrets, ports=ports)
    try:
        if detach:
            directory = ClusterDirectory(read_manifest(options).metadata.name)
            sys.exit(start_detached(directory, options.as_arguments(), click.echo))
        asyncio.run(run_up(options, Display(make_console())))
    except* (ManifestError, AlreadyRunningError, PortError) as group:
        raise CommandError(str(_first(group))) from group


def _first(error: BaseException) -> BaseException:
    """The first cause in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@cli.command()
@cluster_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str | None, *, as_json: bool) -> None:
    """Shows a cluster's routers and engines."""
    view = asyncio.run(read_view(_choose_cluster(name)))
    if as_json:
        click.echo(json.dumps(view.to_dict(), indent=2))
        return
    console = make_console()
    console.print(make_table(view))
    if view.is_ready:
        console.print(f"try: {make_curl_line(view)}", markup=False, soft_wrap=True)


@cli.command()
@cluster_option
@click.option("--all", "is_all", is_flag=True, help="Stop every cluster that was started in this directory.")
@click.option("--now", is_flag=True, help="Do not wait for streams to end.")
def down(name: str | None, *, is_all: bool, now: bool) -> None:
    """Stops a cluster."""
    running = [cluster for cluster in find_clusters() if cluster.is_running()]
    if name is None and not running:
        click.echo("nothing runs")
        return
    for cluster in running if is_all else [_choose_cluster(name)]:
        stop_cluster(cluster, is_hurried=now, report=click.echo)


@cli.command()
@click.argument("request_id")
@cluster_option
@click.option("--api-key", envvar="SLUICE_API_KEY", default="", help="Key of a cluster that asks for one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(request_id: str, name: str | None, *, api_key: str, as_json: bool) -> None:
    """Tells why a request (its x-request-id) ran where it ran."""
    view = asyncio.run(read_view(_choose_cluster(name)))
    try:
        story = asyncio.run(fetch_story(view.routers, request_id, api_key))
    except UnknownRequestError as error:
        raise CommandError(str(error)) from error
    if as_json:
        click.echo(json.dumps(story, indent=2))
    else:
        make_console().print(make_story(story))


DEMO_HOME = HOME / "demo"


@cli.command()
@click.option(
    "--manifest",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("examples/tiny-cpu.yaml"),
    show_default=True,
    help="ServingCluster to show; the demo edits a copy.",
)
@click.option("--keep", is_flag=True, help="Leave the cluster running.")
@ports_option
def demo(manifest: Path, *, keep: bool, ports: range) -> None:
    """Shows in a minute what Sluice does: placement, moves, a live slider, a killed engine."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it, too, stops the cluster on the way out
    DEMO_HOME.mkdir(parents=True, exist_ok=True)
    copy = DEMO_HOME / "demo.yaml"
    copy.write_text(re.sub(r"(?m)^  name: \S+$", "  name: demo", manifest.read_text(), count=1))
    book = PortBook(ports)
    http_port = book.choose([8000])
    book.release(http_port)
    options = UpOptions(manifest=copy, http_port=http_port, volumes={}, ports=ports)
    directory = ClusterDirectory("demo")
    try:
        wanted = read_manifest(options)
        model = wanted.served_name
        if wanted.spec.router.auth.mode != "None" or wanted.spec.router.tls.mode != "Disabled":
            raise CommandError("the demo shows a cluster in the open; remove spec.router.auth and spec.router.tls")
        if directory.is_running():
            stop_cluster(directory, is_hurried=True, report=click.echo)
        if start_detached(directory, options.as_arguments(), click.echo):
            raise CommandError("the cluster did not start")
        asyncio.run(Demo(directory, copy, model, make_console()).run())
    except (ManifestError, DemoError, UnknownRequestError) as error:
        raise CommandError(str(error)) from error
    finally:
        if keep:
            click.echo("the cluster still runs; `sluice down --cluster demo` stops it")
        elif directory.is_running():
            stop_cluster(directory, is_hurried=True, report=click.echo)


cli.add_command(plan)
cli.add_command(simulate)


def main() -> None:
    """Runs the command line."""
    sys.exit(cli())


if __name__ == "__main__":
    main()
