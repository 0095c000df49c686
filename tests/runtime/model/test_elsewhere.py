"""A model in processes: what a process does not own is on meta there, and the model comes back whole."""

from __future__ import annotations

import copy
import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import penstock
from penstock.base.errors import ConfigError, SplitError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, own_models, plain
from tests.support.documentation import DOCS, blocks
from tests.support.groups import run_cases
from tests.support.lanes import slow

W = plain.WIDTH
BIG = 1 << 22  # numbers in a layer of 16 MiB


class LastState(nn.Module):
    def forward(self, out: tuple[Tensor, Any]) -> Tensor:
        return out[0]


def with_buffers() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W)) for _ in range(4)]
    for n, layer in enumerate(layers):
        layer.register_buffer("scratch", torch.full((3,), float(n)), persistent=False)
    return nn.Sequential(*layers)


def computed_weights() -> nn.Module:
    """Weights that are computed from others, by both kinds of torch's functions."""
    linears = [nn.Linear(W, W) for _ in range(4)]
    parametrizations.weight_norm(linears[2])
    prune.random_unstructured(linears[1], "weight", 0.3)
    nn.utils.spectral_norm(linears[0])
    prune.random_unstructured(linears[3], "weight", 0.3)
    return nn.Sequential(*linears)


def recurrent() -> nn.Module:
    layers = [nn.Sequential(nn.LSTM(W, W, batch_first=True), LastState()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(W, W))


def one_module_at_two_places() -> nn.Module:
    shared = nn.Linear(W, W)
    return nn.Sequential(shared, nn.GELU(), nn.Linear(W, W), nn.Sequential(shared, nn.Tanh()))


def module_list() -> nn.Module:
    return nn.ModuleList(nn.Linear(W, W) for _ in range(3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: plain.model(4),
    "module list": module_list,
    "buffers": with_buffers,
    "computed weights": computed_weights,
    "recurrent": recurrent,
    "one module twice": one_module_at_two_places,
    "tied, with its loss": own_models.NanoGPT,
    "unused parts": own_models.WithUnused,
    "a buffer of all blocks": own_models.SharedRotary,
    "parameters of the model itself": own_models.ByIndex,
    "a buffer in no state": own_models.Masked,
    "transformers": lambda: hf_models.model("llama", tied=True),
    "transformers, positions": lambda: hf_models.model("gpt2"),
}


def loss_of(output: object, target: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return logits.float().square().mean()


def made(kind: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """Model, batch and loss function of a kind, the same in every process."""
    torch.manual_seed(0)
    net = KINDS[kind]()
    net.train()
    if kind.startswith("transformers"):
        tokens, labels, _ = hf_models.batch(sequence=8, side="right")
        return net, tokens, labels, None
    if "module" in type(net).__module__ and not isinstance(net, own_models.Parts | own_models.NanoGPT):
        shape = (4, 5, W) if kind == "recurrent" else (4, W)
        return net, torch.randn(shape), torch.randn(shape), nn.functional.mse_loss
    x, y = own_models.batch()
    return net, x, y, None if kind == "tied, with its loss" else loss_of


def tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters(remove_duplicate=False)
    yield from net.named_buffers(remove_duplicate=False)
    for path, module in net.named_modules():  # what hooks of prune and spectral_norm have computed
        yield from ((f"{path}.{k}", v) for k, v in vars(module).items() if isinstance(v, Tensor))


def train(pipe: Pipeline, x: Tensor, y: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        loss = pipe.step(x, y).loss
        optimizer.step()
        optimizer.zero_grad()
    assert loss is not None
    return loss


def in_process(rank: int, kind: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], set[str]]:
    net, x, y, loss_fn = made(kind)
    references = [*net.parameters(), *net.buffers()]  # as an optimizer has them
    with Pipeline(net, loss_fn, microbatches=2, timeout=30) as pipe:
        own = [t for m in pipe.stage_modules() for _, t in tensors(m)]
        for name, tensor in tensors(net):
            owned = any(tensor is each for each in own)
            assert tensor.is_meta is not (owned or "rotary_emb" in name), name
        assert not any(t.is_meta for t in own)
        everyones = [b for name, b in net.named_buffers() if "rotary_emb" in name]
        assert all(
            any(t is each for each in (*own, *everyones)) or t.is_meta or not t.numel() for t in references
        )
        averaged = torch.optim.swa_utils.AveragedModel(net) if kind == "sequential" else None
        loss = train(pipe, x, y)
        if averaged is not None:
            averaged.update_parameters(net)
            names = {f"module.{name}" for name, _ in pipe.named_parameters()}
            assert {name for name, p in averaged.named_parameters() if not p.is_meta} == names
        state = pipe.full_state_dict()
        pipe.close()
    trainable = [p.requires_grad for p in net.parameters()]
    net.load_state_dict(state, assign=True)
    assert not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    assert [p.requires_grad for p in net.parameters()] == trainable
    names = {name for name, _ in net.named_parameters()}
    if not isinstance(net, nn.ModuleList):
        net.eval()(x)
    return loss, dict(net.state_dict()), dict(net.named_buffers()), names


@pytest.mark.slow
def test_a_process_holds_its_share_and_the_model_comes_back(processes: LocalProcesses):
    kinds = list(KINDS)
    for kind, by_rank in zip(kinds, run_cases(processes, 2, in_process, [(k,) for k in kinds]), strict=True):
        net, x, y, loss_fn = made(kind)
        with Pipeline(net, loss_fn, ranks=2, microbatches=2) as pipe:
            loss = train(pipe, x, y)
        for found, state, buffers, names in by_rank:
            assert torch.equal(found, loss), kind
            assert list(state) == list(net.state_dict()), kind
            assert all(torch.equal(state[n], v) for n, v in net.state_dict().items()), kind
            assert all(torch.equal(buffers[n], b) for n, b in net.named_buffers()), kind
            assert names == {n for n, _ in net.named_parameters()}, f"{kind}: tied weights"


def resident() -> int:
    """Bytes of this process in memory; what malloc keeps for later is given back first."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text()
    return 1024 * sum(int(n) for n in re.findall(r"^RssAnon:\s+(\d+)", lines, re.M))


def bytes_of(rank: int) -> tuple[int, int, int]:
    before = resident()
    net = nn.Sequential(*[nn.Embedding(BIG // W, W) for _ in range(8)])
    kept = list(net.parameters())
    whole = resident() - before
    with Pipeline(net, nn.functional.mse_loss, microbatches=2, timeout=30):
        values = sum(p.nbytes for p in kept if not p.is_meta)
        return whole, resident() - before, values


@pytest.mark.slow
def test_the_memory_of_the_rest_is_free(processes: LocalProcesses):
    layer = 4 * W * (BIG // W)
    for whole, after, values in processes.run(4, bytes_of):
        assert values == 2 * layer
        assert whole > 7 * layer  # what this measures is there
        assert after < 3 * layer


def refusals(rank: int) -> list[str]:
    net, x, y, loss_fn = made("sequential")
    found = []
    with Pipeline(net, loss_fn, microbatches=2, timeout=30) as pipe:
        train(pipe, x, y)
        state = pipe.full_state_dict()
        with pytest.raises((ConfigError, SplitError)) as refusal:
            Pipeline(net, loss_fn, microbatches=2, timeout=30, split=[1, 3])
        found.append(str(refusal.value))
    with pytest.raises((ConfigError, SplitError)) as refusal:
        Pipeline(net, loss_fn, microbatches=2, timeout=30, split=[1, 3])
    found.append(str(refusal.value))
    with Pipeline(net, loss_fn, microbatches=2, timeout=30) as pipe:  # its own stages have their values
        assert all(torch.equal(v, state[n]) for n, v in pipe.full_state_dict().items())
    net.load_state_dict(state, assign=True)
    with Pipeline(net, loss_fn, microbatches=2, timeout=30, split=[1, 3]) as pipe:
        assert all(torch.equal(v, state[n]) for n, v in pipe.full_state_dict().items())
        train(pipe, x, y)
        net.load_state_dict(pipe.full_state_dict(), assign=True)
        with pytest.raises(ConfigError) as replaced:
            pipe.step(x, y)
        found.append(str(replaced.value))
    return found


def test_what_has_no_values_cannot_be_trained(processes: LocalProcesses):
    for rank, (open_still, closed, replaced) in enumerate(processes.run(2, refusals)):
        for text in (open_still, closed):
            assert "meta" in text
            assert "pipe.full_state_dict()" in text
            assert "assign=True" in text
        assert ("0.0.weight" if rank == 0 else "1.0.weight") in replaced
        assert "pipe.load_state_dict" in replaced


def called(rank: int, kind: str) -> tuple[str, Tensor, Tensor]:
    """What a call of the model says while it trains, and its loss in this pipeline and in a second one."""
    net, x, y, loss_fn = made(kind)
    with Pipeline(net, loss_fn, microbatches=2, timeout=30) as pipe:
        with pytest.raises(penstock.PenstockError) as refused:
            net(x)
        train(pipe, x, y)
        loss = pipe.evaluate(x, y).loss
        state = pipe.full_state_dict()
    net.load_state_dict(state, assign=True)
    net(x)
    with Pipeline(net, loss_fn, microbatches=2, timeout=30) as pipe:
        return str(refused.value), loss, pipe.evaluate(x, y).loss


@pytest.mark.slow
def test_a_call_of_the_model_says_where_its_weights_are(processes: LocalProcesses):
    kinds = ["sequential", "tied, with its loss", "a buffer of all blocks", "transformers"]
    for by_rank in run_cases(processes, 2, called, [(kind,) for kind in kinds]):
        for said, first, second in by_rank:
            assert "only the weights of its own stages" in said
            assert "pipe.evaluate" in said
            assert "full_state_dict" in said
            assert torch.equal(first, second)


def failing(rank: int) -> bool:
    """Whether a pipeline that could not be built has left the model as it was."""
    net = plain.model(4)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ConfigError):
        Pipeline(net, nn.functional.mse_loss, microbatches=2, timeout=30, split=[1, 1, 1])
    options = penstock.ExecutionOptions(compile="stage")
    with pytest.raises(ConfigError):
        Pipeline(net, nn.functional.mse_loss, microbatches=2, timeout=30, recompute="full", execution=options)
    return all(torch.equal(v, before[n]) for n, v in net.state_dict().items())


def test_a_pipeline_that_was_not_built_changes_nothing(processes: LocalProcesses):
    assert all(processes.run(2, failing))


def test_a_parameter_replaced_under_an_optimizer_is_refused():
    net, x, y, loss_fn = made("sequential")
    with Pipeline(net, loss_fn, ranks=2, microbatches=2) as pipe:
        train(pipe, x, y)
        assert not any(p.is_meta for p in net.parameters())
        net.load_state_dict(pipe.full_state_dict(), assign=True)
        pipe.evaluate(x, y)
        with pytest.raises(ConfigError, match=r"0\.0\.weight was replaced"):
            pipe.step(x, y)


def averaged(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and weights of the moving average that docs/models.md shows."""
    (block,) = (b for b in blocks(DOCS / "models.md") if "average[name].lerp_" in b.text)
    net, x, y, _ = made("module list")
    names = {"penstock": penstock, "torch": torch, "F": nn.functional, "x": x, "y": y, "model": net}
    exec(compile(block.text, "models.md", "exec"), names)
    return names["loss"], names["weights"]


def plain_average() -> tuple[Tensor, dict[str, Tensor]]:
    layers, x, y, _ = made("module list")
    net = nn.Sequential(*layers)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    average.update_parameters(net)
    for _ in range(4):
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    return nn.functional.mse_loss(average(x), y).detach(), average.module.state_dict()


@pytest.mark.parametrize("transport", ["threads", *slow("processes")])
def test_the_moving_average_of_the_page_is_that_of_torch(request: pytest.FixtureRequest, transport: str):
    loss, weights = plain_average()
    in_processes = transport == "processes"
    found = request.getfixturevalue("processes").run(2, averaged) if in_processes else [averaged(0)]
    for one, state in found:
        assert torch.allclose(one, loss, rtol=1e-5)
        assert list(state) == list(weights)
        assert all(torch.allclose(state[n], w, rtol=1e-5, atol=1e-7) for n, w in weights.items())
