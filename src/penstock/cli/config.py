"""``penstock config``: every key of a training run's config, with default, allowed values and meaning."""

from __future__ import annotations

import click


@click.command(epilog="Example:  penstock config optim.lr runtime")
@click.argument("names", nargs=-1, metavar="[SECTION[.KEY]]...")
@click.option("--markdown", is_flag=True, help="Print the page docs/config.md.")
def command(names: tuple[str, ...], markdown: bool) -> None:
    """Explain keys of the config of `penstock train`: default, allowed values, meaning.

    Without names, all keys. `penstock train --print-config` prints the config of a run instead.
    """
    from penstock.train.config.config_keys import keys_page, keys_text

    if markdown and names:
        raise click.UsageError("--markdown prints all keys; leave the names out")
    click.echo(keys_page() if markdown else keys_text(names), nl=False)
