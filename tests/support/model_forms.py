"""Models in the forms of known libraries and papers: residual networks, vision transformers, U-Nets, and others.

They are here because pytest rewrites the code of test files, and `penstock.split` wants the code that its source shows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.own_models import SEQUENCE, VOCABULARY, WIDTH, Block, Parts

IMAGE = 16


def images(rows: int = 4, channels: int = 3, seed: int = 3) -> Tensor:
    """Return images, float32 (rows, channels, IMAGE, IMAGE)."""
    return torch.randn(rows, channels, IMAGE, IMAGE, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int = 4, seed: int = 4) -> Tensor:
    """Return token ids, int64 (rows, SEQUENCE)."""
    return torch.randint(0, VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(seed))


# Residual network: the forward is one method away, four stages of growing width.


class BasicBlock(nn.Module):
    def __init__(
        self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
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
    def __init__(self) -> None:
        super().__init__()
        self.inplanes = 4
        self.conv1 = nn.Conv2d(3, 4, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(4)
        self.layer2 = self._make_layer(8, 2)
        self.layer3 = self._make_layer(16, 2)
        self.layer4 = self._make_layer(32, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(32, 10)

    def _make_layer(self, planes: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes:
            downsample = nn.Sequential(
                nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes
        layers.append(BasicBlock(planes, planes))
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


class SubclassedResNet(ResNet):
    """A class of someone else's, with something before and after its forward."""

    def forward(self, x, temperature=2.0):
        return super().forward(x - 0.5) / temperature


class Segmenter(nn.Module):
    """Features of a network by a method that is not its forward, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = VisionTransformer()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        features = self.backbone.forward_features(x)
        return self.head(features[:, 1:])


class VGG(nn.Module):
    """Convolutions have the depth, and the classifier has the parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 4, 4, 8, 8]
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise(widths):
            layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            nn.Linear(8 * 16, 64), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(64, 10)
        )

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


# Vision transformer: features and head in methods, an optional class token, options that the model does not use.


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return self.net(x)


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp()
        self.drop_path = nn.Identity()

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, WIDTH, 4, 4)
        self.norm = nn.Identity()

    def forward(self, x):
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class VisionTransformer(nn.Module):
    def __init__(self, class_token: bool = True, global_pool: str = "token") -> None:
        super().__init__()
        self.global_pool = global_pool
        self.num_prefix_tokens = 1 if class_token else 0
        self.no_embed_class = False
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH)) if class_token else None
        self.pos_embed = nn.Parameter(torch.randn(1, 16 + self.num_prefix_tokens, WIDTH) * 0.02)
        self.pos_drop = nn.Dropout(0.0)
        self.patch_drop = nn.Identity()
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*[ViTBlock() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH) if global_pool == "token" else nn.Identity()
        self.fc_norm = nn.Identity() if global_pool == "token" else nn.LayerNorm(WIDTH)
        self.attn_pool = None
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, 10)

    def _pos_embed(self, x):
        if self.pos_embed is None:
            return x
        to_cat = []
        if self.cls_token is not None:
            to_cat.append(self.cls_token.expand(x.shape[0], -1, -1))
        if self.no_embed_class:
            x = x + self.pos_embed
            if to_cat:
                x = torch.cat([*to_cat, x], dim=1)
        else:
            if to_cat:
                x = torch.cat([*to_cat, x], dim=1)
            x = x + self.pos_embed
        return self.pos_drop(x)

    def forward_features(self, x):
        """Run the blocks."""
        x = self.patch_embed(x)
        x = self._pos_embed(x)
        x = self.patch_drop(x)
        x = self.norm_pre(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = torch.utils.checkpoint.checkpoint_sequential(self.blocks, 2, x)
        else:
            x = self.blocks(x)
        x = self.norm(x)
        return x

    def pool(self, x, pool_type=None):
        if self.attn_pool is not None:
            return self.attn_pool(x)
        pool_type = self.global_pool if pool_type is None else pool_type
        return x[:, 0] if pool_type == "token" else x[:, self.num_prefix_tokens :].mean(1)

    def forward_head(self, x, pre_logits: bool = False):
        x = self.pool(x)
        x = self.fc_norm(x)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x):
        x = self.forward_features(x)
        x = self.forward_head(x)
        return x


class VisionTransformerInOneLine(VisionTransformer):
    def __init__(self) -> None:
        super().__init__(class_token=False, global_pool="avg")

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


class PatchMerging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    def __init__(self, depth: int, down: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ViTBlock() for _ in range(depth)])
        self.downsample = PatchMerging() if down else None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class StagesWithForwards(nn.Module):
    """Stages whose forwards have the blocks, as in hierarchical vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.layers = nn.ModuleList([Stage(1, True), Stage(3, False)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class SequentialOfStages(StagesWithForwards):
    """The same in an nn.Sequential of nn.Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(ViTBlock()), PatchMerging(), nn.Sequential(ViTBlock(), ViTBlock())
        )

    def forward(self, x):
        return self.head(self.layers(self.patch_embed(x)).mean(1))


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        out = 0
        for i, expert in enumerate(self.experts):
            out = out + weights[..., i : i + 1] * expert(x)
        return x + out


class Experts(Parts):
    """Blocks with a loop of their own, whose rounds stand side by side."""

    def __init__(self) -> None:
        super().__init__(3, ExpertBlock)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvStem(nn.Module):
    """Convolutions before the blocks, in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, WIDTH, 3, 2, 1),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
        )
        self.blocks = nn.ModuleList([ViTBlock() for _ in range(4)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


# U-Nets: a way down and a way up, with something between.


class ResBlock(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, i)
        self.conv = nn.Conv2d(i, o, 3, padding=1)
        self.time = nn.Linear(8, o)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, t):
        h = self.conv(F.silu(self.norm(x)))
        return self.skip(x) + h + self.time(t)[:, :, None, None]


class ConvBlock(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    """A U-Net for segmentation; skips in a list; a mid block that is an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = ConvBlock(3, 4)
        self.downs = nn.ModuleList([ConvBlock(4, 8), ConvBlock(8, 16)])
        self.pool = nn.MaxPool2d(2)
        self.mid = nn.Sequential(ConvBlock(16, 16), ConvBlock(16, 16))
        self.ups = nn.ModuleList([ConvBlock(32, 8), ConvBlock(16, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.inc(x)
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.mid(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2.0)
            x = torch.cat([x, skips.pop()], dim=1)
            x = up(x)
        return self.out(x)


class UNetWithALoneMiddle(UNet):
    """A mid block that is one module, with an nn.Sequential in it."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = ConvBlock(16, 16)

    def forward(self, x):
        x = self.inc(x)
        skips = [x]
        for i, down in enumerate(self.downs):
            x = down(self.pool(x) if i else x)
            skips.append(x)
        x = self.mid(self.pool(x))
        for up, skip in zip(self.ups, range(2), strict=True):
            x = F.interpolate(x, scale_factor=2.0) if skip == 0 else x
            x = up(torch.cat([x, skips.pop()], dim=1)) if skip == 0 else up(torch.cat([x, x], dim=1))
        return self.out(x)


class DenoisingUNet(nn.Module):
    """A U-Net for diffusion: levels of several modules, two modules in the middle, timesteps."""

    def __init__(self) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8))
        self.init_conv = nn.Conv2d(3, 4, 3, padding=1)
        self.downs = nn.ModuleList(
            [
                nn.ModuleList([ResBlock(4, 4), ResBlock(4, 4), nn.Conv2d(4, 8, 3, 2, 1)]),
                nn.ModuleList([ResBlock(8, 8), ResBlock(8, 8), nn.Conv2d(8, 8, 3, 1, 1)]),
            ]
        )
        self.mid_block1, self.mid_block2 = ResBlock(8, 8), ResBlock(8, 8)
        self.ups = nn.ModuleList(
            [
                nn.ModuleList([ResBlock(16, 8), ResBlock(16, 8), nn.Conv2d(8, 4, 3, 1, 1)]),
                nn.ModuleList([ResBlock(8, 4), ResBlock(8, 4), nn.Conv2d(4, 4, 3, 1, 1)]),
            ]
        )
        self.final = ResBlock(4, 4)
        self.final_conv = nn.Conv2d(4, 3, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        t = self.time_mlp(torch.stack([time, time / 2, time.sin(), time.cos()], dim=1))
        h = []
        for block1, block2, downsample in self.downs:
            x = block1(x, t)
            h.append(x)
            x = block2(x, t)
            h.append(x)
            x = downsample(x)
        x = self.mid_block1(x, t)
        x = self.mid_block2(x, t)
        for n, (block1, block2, upsample) in enumerate(self.ups):
            if n == 1:
                x = F.interpolate(x, scale_factor=2.0)
            x = torch.cat((x, F.interpolate(h.pop(), x.shape[-2:])), dim=1)
            x = block1(x, t)
            x = torch.cat((x, F.interpolate(h.pop(), x.shape[-2:])), dim=1)
            x = block2(x, t)
            x = upsample(x)
        x = self.final(x, t)
        return self.final_conv(x)


# Diffusion transformer: timestep and label beside the image, and modulation of every block by both.


class TimestepEmbedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    @staticmethod
    def timestep_embedding(t, dim):
        half = dim // 2
        freqs = torch.exp(-math.log(100) * torch.arange(half, dtype=torch.float32) / half)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, t):
        return self.mlp(self.timestep_embedding(t, 8))


class LabelEmbedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(11, WIDTH)

    def forward(self, labels, train):
        if train:
            labels = torch.where(labels == 3, 10, labels)
        return self.embedding_table(labels)


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.mlp = Attention(), Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, c):
        s1, c1, g1, s2, c2, g2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + g1.unsqueeze(1) * self.attn(modulate(self.norm1(x), s1, c1))
        return x + g2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), s2, c2))


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, 4 * 4 * 3)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out_channels = 3
        self.x_embedder = PatchEmbed()
        self.t_embedder = TimestepEmbedder()
        self.y_embedder = LabelEmbedder()
        self.pos_embed = nn.Parameter(torch.randn(1, 16, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(4)])
        self.final_layer = FinalLayer()

    def unpatchify(self, x):
        c, p = self.out_channels, 4
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], h, w, p, p, c)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], c, h * p, h * p)

    def forward(self, x, t, y):
        x = self.x_embedder(x) + self.pos_embed
        t = self.t_embedder(t)
        y = self.y_embedder(y, self.training)
        c = t + y
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        x = self.unpatchify(x)
        return x


# Two towers, and an encoder with a decoder.


class TextTower(Parts):
    def __init__(self) -> None:
        super().__init__(3)
        del self.head

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


class ImageTower(nn.Module):
    """A transformer whose forward ends in its loop."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = PatchEmbed()
        self.layers = nn.ModuleList([ViTBlock() for _ in range(3)])

    def forward(self, x):
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = ImageTower(), TextTower()
        self.image_projection = nn.Linear(WIDTH, 6, bias=False)
        self.text_projection = nn.Parameter(torch.randn(WIDTH, 6))
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def encode_image(self, image):
        return self.image_projection(self.visual(image).mean(1))

    def encode_text(self, text):
        return self.text(text) @ self.text_projection

    def forward(self, image, text):
        image_features = F.normalize(self.encode_image(image), dim=-1)
        text_features = F.normalize(self.encode_text(text), dim=-1)
        return self.logit_scale.exp() * image_features * text_features


class TwoTowersInOneLine(TwoTowers):
    def forward(self, image, text):
        return F.normalize(self.encode_image(image), dim=-1) * self.text(text).mean()


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        return self.own(x) + self.cross(memory)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([Block() for _ in range(3)])
        self.decoder = nn.ModuleList([CrossBlock() for _ in range(3)])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def encode(self, ids):
        h = self.embed(ids)
        for layer in self.encoder:
            h = layer(h)
        return h

    def decode(self, memory, ids):
        h = self.embed(ids)
        for layer in self.decoder:
            h = layer(h, memory)
        return h

    def forward(self, x, decoder_input):
        return self.lm_head(self.decode(self.encode(x), decoder_input))


# Ways to write it.


class MethodNotModule(Parts):
    """A method with a name and a call like a module's."""

    def pre(self, x):
        return self.embedding(x * 2 % VOCABULARY)

    def post(self, x):
        return self.head(self.norm(x) / 2)

    def forward(self, x):
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        x = self.post(x)
        return x


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def embed(self, x):
        return self.table(x) * 3

    def forward(self, x):
        return self.table(x)


class MethodOfAModule(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedder()

    def forward(self, x):
        x = self.embedding.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OneMethodInALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()

    def twice(self, x):
        return self.block(x) * 2

    def forward(self, x):
        x = self.embedding(x)
        for _ in range(4):
            x = self.twice(x)
        return x


class Calling(Block):
    def __call__(self, x):
        return super().__call__(x) * 0.5


class BlocksWithACall(Parts):
    def __init__(self) -> None:
        super().__init__(block=Calling)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BlocksInASequenceWithACall(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Calling() for _ in range(4)])

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


class PatchedBlocks(Parts):
    """A forward that one module has for itself."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = functools.partial(type(block).forward, block)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ByKeyword(Parts):
    def forward(self, x):
        x = self.embedding(input=x)
        for block in self.blocks:
            x = block(x=x)
        return self.head(*[x])


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Module()
        self.m.model = Parts()
        self.same = self.m.model.norm

    def forward(self, x):
        base = self.m.model
        blocks, head = base.blocks, base.head
        x = base.embedding(x)
        for b in blocks:
            x = b(x)
        return head(self.same(x))


class AliasedBlocks(Parts):
    def forward(self, x):
        x = self.embedding(x)
        blocks = self.blocks
        norm = self.norm
        for i in range(len(blocks)):
            x = norm(blocks[i](x))
        return self.head(x)


class LoopInMethod(Parts):
    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.run(self.embedding(x)))


class Child(LoopInMethod):
    def forward(self, x):
        return super().forward(x) * 2


class MethodsOfMethods(Parts):
    def _blocks(self, h, scale, mask=None):
        for block in self.blocks:
            h = block(h) * scale
            if mask is not None:
                h = h * mask
        return h

    def _all(self, x, mask, scale=2.0):
        x = self.embedding(x)
        return self.norm(self._blocks(x, scale=scale, mask=mask))

    def forward(self, x, mask=None):
        y = x
        x = self._all(x, mask)
        return self.head(x) + y[..., None]


class SameMethodTwice(Parts):
    def run(self, x, flip):
        if flip:
            x = -x
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        x = self.run(self.embedding(x), False)
        x = self.run(x, True)
        return self.head(x)


class EndsInItsLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


class AroundABackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = EndsInItsLoop()
        self.head = Mlp()

    def forward(self, x):
        return self.head(self.backbone(x))


class SequenceInABackbone(nn.Module):
    """A backbone that is nothing but a call of its blocks, and a stem of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = Embedder()
        self.backbone = OnlyBlocks()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.embedder(x)
        x = self.backbone(x)
        return self.head(x)


class OnlyBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(*[Block() for _ in range(4)])

    def forward(self, x):
        return self.seq(x)


class LossInAMethod(Parts):
    """What computes the loss, and what has the blocks, are both one call away."""

    def features(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x

    def _impl(self, x, y):
        h = self.norm(self.features(x))
        logits = self.head(h)
        if y is None:
            return_value = logits
        else:
            y = y.flatten()
            return_value = logits, F.cross_entropy(logits.flatten(0, 1), y)
        return return_value

    def forward(self, x, y=None):
        return self._impl(x, y)


class ModeWithin(nn.Module):
    """A backbone that reads its mode and an attribute of its own between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ReadsItsMode()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


class ReadsItsMode(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.0

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.training:
            x = x * self.scale
        return x


class ReadsItsDefault(Parts):
    def forward(self, x, scales=[1.0, 2.0]):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x) * sum(scales)
        for scale in scales:
            x = x / scale
        return self.head(x * scales[0]) if scales else x


class OptionalModules(Parts):
    """Modules that are there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = None
        self.register_module("extra", None)
        self.mixer = Block()

    def forward(self, x):
        x = self.embedding(x)
        if self.mixer is not None:
            for block in self.blocks:
                x = block(x)
        if self.neck is not None:
            x = self.neck(x)
        return self.head(x if self.extra is None else self.extra(x)) * self.mixer(x).mean()


class StagesInALoop(nn.Module):
    """Stages of blocks: each is an nn.Sequential or an nn.ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])
        self.more = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        x = self.embedding(x)
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
        for stage in self.more:
            for block in stage:
                x = block(x)
            x = x / 2
        return x


FROM_TOKENS: list[Callable[[], nn.Module]] = [
    MethodNotModule, MethodOfAModule, OneMethodInALoop, BlocksWithACall, BlocksInASequenceWithACall,
    PatchedBlocks, ByKeyword, Aliased, AliasedBlocks, LoopInMethod, Child, MethodsOfMethods, SameMethodTwice,
    EndsInItsLoop, AroundABackbone, SequenceInABackbone, LossInAMethod, ModeWithin, ReadsItsDefault,
    OptionalModules, StagesInALoop, Experts,
]  # fmt: skip
"""Models of token ids."""

FROM_IMAGES: list[Callable[[], nn.Module]] = [
    ResNet, SubclassedResNet, Segmenter, VGG, VisionTransformer, VisionTransformerInOneLine, ConvStem, UNet,
    UNetWithALoneMiddle, StagesWithForwards, SequentialOfStages,
]  # fmt: skip
"""Models of images."""


def named_inputs(make: Callable[[], nn.Module], rows: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the first input of a model, and the others by their names."""
    generator = torch.Generator().manual_seed(5)
    if make in FROM_TOKENS:
        return tokens(rows), {}
    if make is EncoderDecoder:
        return tokens(rows), {"decoder_input": tokens(rows, 6)}
    if make in (TwoTowers, TwoTowersInOneLine):
        return images(rows), {"text": tokens(rows)}
    if make is DenoisingUNet:
        return images(rows), {"time": torch.rand(rows, generator=generator)}
    if make is DiT:
        t, y = torch.randint(0, 10, (2, rows), generator=generator)
        return images(rows), {"t": t, "y": y}
    return images(rows), {}


FORMS = [*FROM_TOKENS, *FROM_IMAGES, DenoisingUNet, DiT, TwoTowers, TwoTowersInOneLine, EncoderDecoder]
