"""``penstock watch``: a live page of a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    epilog="Example:  penstock watch runs/my-run\n\n          penstock watch runs/my-run --port 8765"
)
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="PORT",
    help="Port on the loopback interface. Default: a free one.",
)
def command(run: Path, port: int) -> None:
    """Show a run in the browser while it is under way.

    RUN is the folder of a run. It may be finished, or not begun yet. The page has the curves of the metrics, the timeline of
    the last traced step, the memory, and the last heartbeat of each rank. It is served on this machine alone, under an
    address that contains a secret token. Nothing is written. Stop it with Ctrl-C; the run is not affected.
    """
    from penstock.watch.watch_server import WatchServer

    try:
        with WatchServer(run, port) as server:
            waits = "" if run.exists() else "; there is no such folder yet, and the page waits for it"
            click.echo(f"watching {run}{waits}\nCtrl-C stops watching, and not the run\n{server.url}")
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        click.echo()
