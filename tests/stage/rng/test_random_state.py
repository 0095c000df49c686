"""A layer's draws depend only on (seed, step, microbatch, name), or an error names the layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.base.errors import ConfigError
from penstock.stage.rng.initial import build_seeded
from penstock.stage.rng.isolated_rng import seed_of
from penstock.stage.rng.random_state import RandomState, advanced

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def layers() -> list[tuple[str, nn.Module]]:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)) for _ in range(4)]
    return [(f"blocks.{n}", block) for n, block in enumerate(blocks)]


def forward(
    state: RandomState, part: Sequence[tuple[str, nn.Module]], x: Tensor, step: int, microbatch: int
) -> Tensor:
    for name, layer in part:
        x = state.run(name, layer, step, microbatch, lambda layer=layer, x=x: layer(x))
    return x


def test_a_model_cut_in_two_in_threads_and_out_of_order_draws_what_it_draws_whole():
    model = layers()
    with torch.no_grad():
        twin, unsplit = copy.deepcopy(model), RandomState(7)
        expected = [[forward(unsplit, twin, X, step, m) for m in range(4)] for step in range(3)]

        def work(n: int) -> list[list[Tensor]]:
            with torch.no_grad():
                copied, state = copy.deepcopy(model), RandomState(7)
                actual = []
                for step in range(3):
                    half = [forward(state, copied[:2], X, step, m) for m in range(4)]
                    torch.rand(n + 1)  # others draw from the default generator, each as much as it likes
                    actual.append([forward(state, copied[2:], half[m], step, m) for m in range(4)])
                return actual

        with ThreadPoolExecutor(4) as pool:
            for actual in pool.map(work, range(4)):
                for ours, theirs in zip(actual, expected, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_replay_draws_the_same_and_another_microbatch_does_not():
    state, drop = RandomState(7), nn.Dropout(0.5)
    first = [state.run("drop", drop, 0, m, lambda: drop(X)) for m in range(2)]
    again = state.run("drop", drop, 0, 0, lambda: drop(X))
    assert torch.equal(first[0], again)
    assert not torch.equal(first[0], first[1])
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed_of(7, 0, 0, "drop"))
        assert torch.equal(drop(X), again)


def test_running_a_layer_counts_its_batches_once_and_leaves_torch_generators_alone():
    (name, layer), before = layers()[0], torch.get_rng_state()
    plain, state = copy.deepcopy(layer), RandomState(7)
    for microbatch in range(3):
        state.run(name, layer, 0, microbatch, lambda: layer(X))
    assert torch.equal(torch.get_rng_state(), before)
    for _ in range(3):
        plain[:2](X)
    for ours, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


class Seen(nn.Module):
    """Notes whether modes are on when it runs."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.attention_dropout, self.modes = p, []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch._C._len_torch_function_stack())
        return F.dropout(x, self.attention_dropout, self.training)


def test_a_layer_that_draws_nothing_runs_without_modes_until_its_settings_change():
    state, seen = RandomState(7), Seen()

    def run(step: int) -> Tensor:
        return state.run("seen", seen, step, 0, lambda: seen(X))

    for step in range(3):
        run(step)
    seen.attention_dropout = 0.5
    for step in range(3, 5):
        assert (run(step) == 0).any()
    seen.eval()
    for step in range(5, 7):
        run(step)
    seen.train()
    assert torch.equal(run(7), run(7))
    assert seen.modes == [1, 0, 0, 1, 1, 1, 0, 1, 1]


class Late(nn.Module):
    """Begins to draw without a change in its settings."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"p": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.options["p"], self.training)


def test_a_layer_that_begins_to_draw_unseen_is_named_once_and_holds_from_then_on():
    state, late, other = RandomState(7), Late(), nn.Linear(8, 8)

    def step(n: int) -> list[Tensor]:
        with state.watching():
            state.run("other", other, n, 0, lambda: other(X))
            return [state.run("late", late, n, m, lambda: late(X)) for m in range(2)]

    step(0)
    late.options["p"] = 0.5
    step(1)
    with pytest.warns(UserWarning, match="layer 'late' began to draw random numbers without a change"):
        one = step(2)
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(one, step(2), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_other_threads_do_no_harm():
    state, rng_free = RandomState(7), Seen()
    for step in range(4):
        with state.watching():
            state.run("quiet", rng_free, step, 0, lambda: rng_free(X))
            torch.rand(1)
    assert rng_free.modes == [1, 1, 1, 1]


class Calls(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


@torch.library.custom_op("penstock_test::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


@torch.library.custom_op("penstock_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def refused(call: Any, match: str) -> None:
    layer = Calls(call)
    with pytest.raises(ConfigError, match=match):
        RandomState(7).run("blocks.3", layer, 0, 0, lambda: layer(X))


def test_operators_that_draw_from_the_default_generator_are_refused_by_name():
    refused(lambda x: noise(x), r"layer 'blocks.3': penstock_test.noise.default draws .* pass them in")
    refused(
        lambda x: torch.ops.aten.bernoulli_(x.clone(), 0.5), r"layer 'blocks.3': aten.bernoulli_.float draws"
    )
    refused(lambda x: torch.ops.aten.dropout(x, 0.5, True), r"layer 'blocks.3': aten.bernoulli_.float draws")


@pytest.mark.parametrize(
    "call",
    [
        twice,
        lambda x: torch.ops.aten.native_dropout(x, 0.5, False)[0],
        lambda x: torch.ops.aten.dropout(x, 0.0, True),
        lambda x: torch.ops.aten.bernoulli_(x.clone(), 0.5, generator=torch.Generator().manual_seed(0)),
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0],
        lambda x: nn.functional.rrelu(x),
        lambda x: x + torch.rand(3, device="meta").dim(),
    ],
)  # fmt: skip
def test_operators_that_draw_nothing_here_are_let_through(call: Any):
    layer = Calls(call)
    actual = RandomState(7).run("blocks.3", layer, 0, 0, lambda: layer(X))
    assert torch.equal(actual, call(X))


@pytest.mark.parametrize("reentrant", [False, True])
def test_draws_within_a_checkpoint_of_the_layer_itself_are_refused(reentrant: bool):
    def again(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(F.dropout, x.requires_grad_(), use_reentrant=reentrant)

    refused(lambda x: again(x.clone()), "layer 'blocks.3' draws random numbers within torch.utils.checkpoint")


def test_a_compiled_layer_may_not_draw_and_is_compiled_all_the_same():
    compiled = []

    def backend(module: Any, _: Any) -> Any:
        compiled.append(module)
        return module.forward

    state, plain = RandomState(7), nn.Linear(8, 8)
    rng_free = torch.compile(plain, backend=backend)
    for step in range(2):
        assert torch.equal(state.run("quiet", rng_free, step, 0, lambda: rng_free(X)), plain(X))
    assert len(compiled) == 1
    drops = nn.Dropout(0.5)
    drops.compile(backend=backend)
    with pytest.raises(ConfigError, match="layer 'drops': its compiled code draws"):
        state.run("drops", drops, 0, 0, lambda: drops(X))


def test_a_function_can_be_run_as_a_layer_is():
    state = RandomState(7)
    one, other = (state.run("loss", F.mse_loss, 0, m, lambda: F.dropout(X, 0.5)) for m in (0, 0))
    assert torch.equal(one, other)


def test_layers_are_built_with_the_same_weights_in_any_order_and_nothing_else_is_seeded():
    before = torch.get_rng_state()
    names = ["embed", "blocks.0", "blocks.1"]
    forwards = {name: build_seeded(lambda: nn.Linear(8, 8), 7, name) for name in names}
    with ThreadPoolExecutor(3) as pool:
        built = pool.map(lambda name: (name, build_seeded(lambda: nn.Linear(8, 8), 7, name)), names[::-1])
        for name, layer in built:
            assert torch.equal(layer.weight, forwards[name].weight)
    assert not torch.equal(forwards["blocks.0"].weight, forwards["blocks.1"].weight)
    assert not torch.equal(build_seeded(lambda: nn.Linear(8, 8), 8, "embed").weight, forwards["embed"].weight)
    assert torch.equal(torch.get_rng_state(), before)
    torch.default_generator.manual_seed(seed_of(7, "embed"))
    assert torch.equal(nn.Linear(8, 8).weight, forwards["embed"].weight)
    torch.set_rng_state(before)


def test_building_within_building_goes_on_as_if_it_had_not_been():
    def build() -> tuple[Tensor, Tensor]:
        first = torch.rand(3)
        build_seeded(lambda: nn.Linear(2, 2), 7, "inner")
        return first, torch.rand(3)

    first, second = build_seeded(build, 7, "outer")
    both = build_seeded(lambda: torch.stack([torch.rand(3), torch.rand(3)]), 7, "outer")
    assert torch.equal(torch.stack([first, second]), both)


@pytest.mark.parametrize("width", [10**6, 10**12])
def test_weights_that_do_not_fit_into_memory_are_refused_with_the_layers_name(width: int):
    with pytest.raises(ConfigError, match="the weights of layer 'embed' do not fit into memory"):
        build_seeded(lambda: nn.Embedding(10**9, width), 7, "embed")


def test_under_autocast_a_draw_from_a_default_generator_is_refused_by_its_operator():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        test_operators_that_draw_from_the_default_generator_are_refused_by_name()
        layer = Calls(twice)
        assert torch.equal(RandomState(7).run("calls", layer, 0, 0, lambda: layer(X)), X * 2)


def test_under_autocast_a_draw_of_another_thread_is_no_fault_of_the_layer():
    layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    twin = copy.deepcopy(layer)

    def call() -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.rand, 1).result()
        return layer(X)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = RandomState(7).run("layer", layer, 0, 0, call)
        actual.sum().backward()
        assert torch.equal(actual, twin(X))
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))


def test_a_microbatch_without_rows_does_not_show_that_a_layer_draws_nothing():
    layer = nn.Dropout(0.5)
    state = RandomState(0)
    x = torch.ones(4, 8)
    want = RandomState(0).run("layer", layer, 0, 1, lambda: layer(x))
    state.run("layer", layer, 0, 0, lambda: layer(x[:0]))
    assert not state.is_rng_free(layer, 0)
    assert torch.equal(state.run("layer", layer, 0, 1, lambda: layer(x)), want)


def test_an_encoder_in_evaluation_takes_the_path_it_takes_in_plain_pytorch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True).eval()
    calls: list[int] = []
    native = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return native(*args)

    x, state = torch.randn(2, 5, 8), RandomState(0)
    state.in_threads = True
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
        expected = layer(x)
        assert len(calls) == 1, "torch has a special path for it"
        for microbatch in range(2):
            assert torch.equal(state.run("encoder", layer, 0, microbatch, lambda: layer(x)), expected)
    assert len(calls) == 3


class Mixed(nn.Module):
    """Attention in evaluation between normalisation and dropout in training, as where a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.attention.eval()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.attention(x, x, x)[0] + self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_a_layer_that_is_partly_in_evaluation_changes_its_buffers_once():
    layer, x = Mixed(), torch.randn(2, 5, 8)
    RandomState(0).run("mixed", layer, 0, 0, lambda: layer(x))
    assert layer.norm.num_batches_tracked == 1


class Counts(nn.Module):
    """Counts its forwards in a buffer, and drops, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return F.dropout(self.attention(x, x, x)[0], 0.5, training=True)


def test_a_layer_that_draws_beside_attention_in_evaluation_draws_what_its_name_gives_it():
    layer, x, before = Counts().eval(), torch.randn(2, 5, 8), torch.get_rng_state()
    with torch.no_grad():
        once, again = (
            [state.run("noisy", layer, 0, m, lambda: layer(x)) for m in range(2)]
            for state in (RandomState(3), RandomState(3))
        )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(*once)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_in_evaluation_that_draws_changes_its_buffers_once():
    layer, x = Counts().eval(), torch.randn(2, 5, 8)
    RandomState(0).run("counts", layer, 0, 0, lambda: layer(x))
    assert layer.count == 1


def test_no_rows_do_not_show_that_a_layer_with_attention_in_evaluation_draws_nothing():
    layer, state = Counts().eval(), RandomState(0)
    x, before = torch.randn(2, 5, 8), torch.get_rng_state()
    # Dropout of no rows draws nothing.
    state.run("counts", layer, 0, 0, lambda: F.dropout(x[:0], 0.5))
    state.run("counts", layer, 0, 1, lambda: layer(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_a_gpu_that_is_first_used_meanwhile_have_drawn_only_if_they_advanced():
    assert not advanced((b"cpu",), (b"cpu", (17, 0), (17, 0)))
    assert advanced((b"cpu",), (b"cpu", (17, 0), (17, 4)))
    assert advanced((b"cpu", (17, 4)), (b"cpu", (17, 8)))
    assert advanced((b"cpu",), (b"other",))


def test_a_layer_draws_nothing_only_once_it_has_run_in_the_step():
    """Between steps it may get other settings."""
    random, plain, drops = RandomState(0), nn.Linear(4, 4), nn.Dropout(0.5)
    x = torch.ones(2, 4)
    for step in (1, 2):
        for name, layer in (("plain", plain), ("drops", drops)):
            assert not random.is_rng_free(layer, step)
            random.run(name, layer, step, 0, lambda layer=layer: layer(x))
        assert random.is_rng_free(plain, step)
        assert not random.is_rng_free(drops, step)
