"""Models in the forms in which libraries and papers publish them, and their training in plain PyTorch and by a pipeline.

They are written as if there were no pipelines: a ResNet as in torchvision, a vision transformer as in timm, a U-Net, two
towers with a contrastive loss, and a diffusion transformer. pytest rewrites test files, so they stand here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

import penstock

ROWS, MICROBATCHES, STEPS = 2, 4, 4
IMAGE, LARGE, CLASSES, WORDS = 16, 32, 5, 19


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Four stages of residual blocks, each an ``nn.Sequential``; ``forward`` calls ``_forward_impl``."""

    def __init__(self, layers=(2, 2, 2, 2), num_classes=CLASSES):
        super().__init__()
        self.inplanes = 4
        self.conv1 = nn.Conv2d(3, self.inplanes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._make_layer(4, layers[0])
        self.layer2 = self._make_layer(8, layers[1], stride=2)
        self.layer3 = self._make_layer(12, layers[2], stride=2)
        self.layer4 = self._make_layer(16, layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes:
            downsample = nn.Sequential(
                nn.Conv2d(self.inplanes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes
        layers += [BasicBlock(planes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def _forward_impl(self, x):
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x

    def forward(self, x):
        return self._forward_impl(x)


class Attention(nn.Module):
    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class TransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, channels, dim, patch=4):
        super().__init__()
        self.num_patches = (IMAGE // patch) ** 2
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)
        self.norm = nn.Identity()

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        return self.norm(x)


class VisionTransformer(nn.Module):
    """A stack in an ``nn.Sequential``, behind ``forward_features`` and ``forward_head``."""

    def __init__(self, dim=12, depth=4, num_classes=CLASSES):
        super().__init__()
        self.num_prefix_tokens = 1
        self.grad_checkpointing = False
        self.global_pool = "token"
        self.patch_embed = PatchEmbed(3, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, dim) * 0.02)
        self.pos_drop = nn.Dropout(0.0)
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*[TransformerBlock(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def _pos_embed(self, x):
        to_cat = []
        if self.cls_token is not None:
            to_cat.append(self.cls_token.expand(x.shape[0], -1, -1))
        if to_cat:
            x = torch.cat([*to_cat, x], dim=1)
        x = x + self.pos_embed
        return self.pos_drop(x)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = self._pos_embed(x)
        x = self.norm_pre(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        x = self.norm(x)
        return x

    def pool(self, x, pool_type=None):
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type == "token":
            return x[:, 0]
        return x[:, self.num_prefix_tokens :].mean(dim=1)

    def forward_head(self, x, pre_logits: bool = False):
        x = self.pool(x)
        return x if pre_logits else self.head(x)

    def forward(self, x):
        x = self.forward_features(x)
        x = self.forward_head(x)
        return x


def timestep_embedding(t, dim, max_period=10000.0):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def two_groups(channels):
    return nn.GroupNorm(2, channels)


class ConvBlock(nn.Module):
    """Two convolutions with a norm each, and the time between them."""

    def __init__(self, inside, out, time, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, out, 3, padding=1), norm(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1), norm(out)
        self.time = nn.Linear(time, out)
        self.act = nn.SiLU()

    def forward(self, x, emb=None):
        h = self.act(self.norm1(self.conv1(x)))
        if emb is not None:
            h = h + self.time(self.act(emb))[:, :, None, None]
        return self.act(self.norm2(self.conv2(h)))


class Up(nn.Module):
    def __init__(self, inside, skip, out, time, norm):
        super().__init__()
        self.up = nn.ConvTranspose2d(inside, out, 2, stride=2)
        self.block = ConvBlock(out + skip, out, time, norm)

    def forward(self, x, skip, emb=None):
        x = self.up(x)
        return self.block(torch.cat([skip, x], dim=1), emb)


class Middle(nn.Module):
    """A residual stack at the lowest resolution, which has most of the weights."""

    def __init__(self, width, norm, depth=2):
        super().__init__()
        deep = 4 * width
        parts = [(nn.Conv2d(deep, deep, 3, padding=1), norm(deep), nn.SiLU()) for _ in range(depth)]
        self.layers = nn.Sequential(
            nn.Conv2d(width, deep, 1), *[m for part in parts for m in part], nn.Conv2d(deep, width, 1)
        )

    def forward(self, x):
        return x + self.layers(x)


class UNet(nn.Module):
    """An encoder whose outputs wait in a list for the decoder; ``t`` is optional."""

    def __init__(self, widths=(4, 6, 8), time=8, norm=two_groups):
        super().__init__()
        self.time_dim = time
        self.time_mlp = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        ins = (widths[0], *widths[:-1])
        self.encoder = nn.ModuleList([ConvBlock(i, w, time, norm) for i, w in zip(ins, widths, strict=True)])
        self.pool = nn.MaxPool2d(2)
        self.mid = Middle(widths[-1], norm)
        froms = (widths[-1], *reversed(widths[1:]))
        self.decoder = nn.ModuleList(
            [Up(i, w, w, time, norm) for i, w in zip(froms, reversed(widths), strict=True)]
        )
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x, t=None):
        emb = None
        if t is not None:
            emb = self.time_mlp(timestep_embedding(t, self.time_dim))
        h = self.stem(x)
        skips = []
        for block in self.encoder:
            h = block(h, emb)
            skips.append(h)
            h = self.pool(h)
        h = self.mid(h)
        for block in self.decoder:
            h = block(h, skips.pop(), emb)
        return self.out(h)


class ImageTower(nn.Module):
    def __init__(self, dim, depth, out):
        super().__init__()
        self.patches = PatchEmbed(3, dim)
        self.positions = nn.Parameter(torch.randn(self.patches.num_patches, dim) * 0.02)
        self.blocks = nn.ModuleList([TransformerBlock(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Parameter(torch.randn(dim, out) * dim**-0.5)

    def forward(self, x):
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(dim=1) @ self.proj


class TextTower(nn.Module):
    def __init__(self, dim, depth, out):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, dim)
        self.positions = nn.Parameter(torch.randn(6, dim) * 0.02)
        self.transformer = nn.Sequential(*[TransformerBlock(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, out, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        x = self.transformer(x)
        x = self.norm(x)
        return self.proj(x[:, -1])


class TwoTowers(nn.Module):
    def __init__(self, dim=12, depth=3, out=8):
        super().__init__()
        self.visual = ImageTower(dim, depth, out)
        self.text = TextTower(dim, depth, out)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, image):
        return F.normalize(self.visual(image), dim=-1)

    def encode_text(self, text):
        return F.normalize(self.text(text), dim=-1)

    def forward(self, image, text):
        image_features = self.encode_image(image)
        text_features = self.encode_text(text)
        return self.logit_scale.exp() * image_features @ text_features.t()


def contrastive(logits: Tensor, target: Tensor) -> Tensor:
    """Each image belongs to the text of its own row; the target has the rows' numbers."""
    pairs = target - target[0]
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        return self.mlp(timestep_embedding(t, self.dim))


class DiTBlock(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by the condition; it begins as the identity."""

    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = Attention(dim)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = Mlp(dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.adaLN_modulation[-1].weight)
        nn.init.zeros_(self.adaLN_modulation[-1].bias)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x


class FinalLayer(nn.Module):
    def __init__(self, dim, patch, channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False)
        self.linear = nn.Linear(dim, patch * patch * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        for zero in (self.linear, self.adaLN_modulation[-1]):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """A diffusion transformer of a noisy image, its time, and its label."""

    def __init__(self, dim=12, depth=4, patch=4, channels=3):
        super().__init__()
        self.patch_size, self.out_channels = patch, channels
        self.x_embedder = PatchEmbed(channels, dim, patch)
        self.t_embedder = TimestepEmbedder(dim)
        self.y_embedder = nn.Embedding(CLASSES + 1, dim)
        table = timestep_embedding(torch.arange(self.x_embedder.num_patches), dim)
        self.pos_embed = nn.Parameter(table[None], requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(dim) for _ in range(depth)])
        self.final_layer = FinalLayer(dim, patch, channels)

    def unpatchify(self, x):
        c, p = self.out_channels, self.patch_size
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], h, w, p, p, c)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], c, h * p, w * p)

    def forward(self, x, t, y):
        x = self.x_embedder(x) + self.pos_embed
        t = self.t_embedder(t)
        y = self.y_embedder(y)
        c = t + y
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        x = self.unpatchify(x)
        return x


Batch = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Input of the model, target of the loss, and other inputs by name."""


def parts_of(batch: Batch) -> list[Batch]:
    """Return the microbatches."""
    x, target, named = batch
    cut = {name: value.chunk(MICROBATCHES) for name, value in named.items()}
    pairs = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    return [(x, y, {k: v[n] for k, v in cut.items()}) for n, (x, y) in enumerate(pairs)]


@dataclass(frozen=True)
class Form:
    """A model, its loss function, its target ("labels", "image" or "rows") and its inputs beside the image."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Tensor], Tensor]
    target: str
    named: tuple[str, ...] = ()
    image: int = IMAGE

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return self.make()

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(40 + step)
        rows = ROWS * MICROBATCHES
        x = torch.randn(rows, 3, self.image, self.image, generator=generator)
        labels = torch.randint(0, CLASSES, (rows,), generator=generator)
        t = torch.randint(0, 1000, (rows,), generator=generator)
        text = torch.randint(0, WORDS, (rows, 6), generator=generator)
        others = {"t": t, "y": labels, "text": text}
        target = {"labels": labels, "image": x.flip(0), "rows": torch.arange(rows)}[self.target]
        return x, target, {name: others[name] for name in self.named}


FORMS = {
    "resnet": Form(ResNet, F.cross_entropy, "labels", image=LARGE),
    "vit": Form(VisionTransformer, F.cross_entropy, "labels"),
    "unet": Form(UNet, F.mse_loss, "image", ("t",)),
    "unet, no time": Form(partial(UNet, norm=nn.BatchNorm2d), F.mse_loss, "image"),
    "two towers": Form(TwoTowers, contrastive, "rows", ("text",)),
    "dit": Form(DiT, F.mse_loss, "image", ("t", "y")),
}


@dataclass(frozen=True)
class Run:
    """What a training is compared by.

    Attributes:
        losses: of every step, by microbatch.
        outputs: of the evaluation after it, by microbatch; None where another process has them.
        evaluated: losses of that evaluation.
        state: the whole model's state at the end.
    """

    losses: list[Tensor]
    outputs: list[Tensor] | None
    evaluated: Tensor
    state: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


@cache
def plainly(name: str) -> Run:
    """Train a form in plain PyTorch, with gradients accumulated microbatch by microbatch."""
    form = FORMS[name]
    net = form.model()
    optimizer = sgd(net.parameters())
    history = []
    for step in range(STEPS):
        losses = []
        for x, target, named in parts_of(form.batch(step)):
            loss = form.loss_fn(net(x, **named), target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        history.append(torch.stack(losses))
    net.eval()
    parts = parts_of(form.batch(STEPS))
    with torch.no_grad():
        outputs = [net(x, **named) for x, _, named in parts]
        losses = [form.loss_fn(o, target) for o, (_, target, _) in zip(outputs, parts, strict=True)]
    return Run(history, outputs, torch.stack(losses), net.state_dict())


def piped(name: str, **options: Any) -> Run:
    """Train a form, as it is, by a pipeline; every process calls it."""
    form = FORMS[name]
    # The towers' loss has the rows of a microbatch beside each other.
    warnings.filterwarnings("ignore", "the loss of two microbatches as one")
    with penstock.Pipeline(form.model(), form.loss_fn, microbatches=MICROBATCHES, **options) as pipe:
        optimizer = sgd(pipe.parameters())
        history = []
        for step in range(STEPS):
            x, target, named = form.batch(step)
            history.append(pipe.step(x, target, **named).losses)
            optimizer.step()
            optimizer.zero_grad()
        x, target, named = form.batch(STEPS)
        evaluated = pipe.evaluate(x, target, outputs=True, **named)
        # Another copy of the last stage may have the rest.
        whole = pipe.holds_last and len(evaluated.outputs) == MICROBATCHES
        return Run(
            history, list(evaluated.outputs) if whole else None, evaluated.losses, pipe.full_state_dict()
        )


def differences(found: Run, wanted: Run, exact: bool = True) -> list[str]:
    """Return what differs between two trainings: in a bit, or by more than another order of the sums can make."""

    def differs(one: Tensor, other: Tensor) -> bool:
        if one.dtype != other.dtype or one.shape != other.shape:
            return True
        return not (torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-3, atol=1e-4))

    pairs = [
        *(
            (f"losses of step {n}", *two)
            for n, two in enumerate(zip(found.losses, wanted.losses, strict=True))
        ),
        ("losses of the evaluation", found.evaluated, wanted.evaluated),
    ]
    if found.outputs is not None and wanted.outputs is not None:
        two_outputs = zip(found.outputs, wanted.outputs, strict=True)
        pairs += [(f"output {n}", *two) for n, two in enumerate(two_outputs)]
    names = sorted(found.state.keys() ^ wanted.state.keys())
    pairs += [(name, found.state[name], value) for name, value in wanted.state.items() if name not in names]
    return [*names, *(what for what, one, other in pairs if differs(one, other))]
