"""The last step of reading a config: values that depend on the processes and on the memory of this machine."""

from __future__ import annotations

from dataclasses import replace

from penstock.base import host
from penstock.base.errors import ConfigError
from penstock.schedule.families import require_family
from penstock.schedule.text import is_csv
from penstock.train.config.config import Config
from penstock.train.config.mesh_config import find_mesh
from penstock.train.data.tokenizer import BYTES

_BYTES_PER_TOKEN = 24
"""Three int64: token, input and target."""


def resolve(config: Config, processes: int | None) -> Config:
    """Fill in what depends on how the command was started."""
    pp = find_mesh(config.parallel, processes).pp
    if config.parallel.pp is None and processes is None and not (config.model.path or config.model.config):
        pp = min(pp, config.model.layers)
    v = config.parallel.virtual_stages
    if not is_csv(config.schedule.name):
        v = require_family(config.schedule.name).require_counts(
            pp, config.schedule.microbatches // config.parallel.dp, v
        )
    _require_memory(config)
    sample = config.sample
    if sample.prompt is None:
        hugging_face = config.model.path or config.model.config
        prompt = "" if hugging_face else "def " if config.model.vocabulary == BYTES else "0"
        sample = replace(sample, prompt=prompt)
    return replace(config, parallel=replace(config.parallel, pp=pp, virtual_stages=v or 1), sample=sample)


def _require_memory(config: Config) -> None:
    """Raise if the tokens of the held-out batches alone do not fit in the memory of this machine or container."""
    here, train = host.memory(), config.train
    needed = train.batch * train.eval_batches * config.data.sequence * _BYTES_PER_TOKEN
    if here is not None and needed > here.total:
        raise ConfigError(
            f"train.eval_batches {train.eval_batches:,} of train.batch {train.batch:,} samples with data.sequence "
            f"{config.data.sequence:,} tokens take about {needed / 1e9:,.0f} GB of memory, and there are "
            f"{here.total / 1e9:,.0f} GB here; take fewer"
        )
