"""Cross entropy of a linear head without its logits.

The logits of a microbatch, [tokens, vocabulary], are often the largest tensor of a step. `LinearCrossEntropy` takes the
head's input instead, and goes through the tokens in chunks: it computes the logits of a chunk, its loss, and at once its
gradients, and keeps only these: [tokens, width] for the input and, in fp32, [vocabulary, width] for the weight.

The head returns `postponed_logits` while the last stage computes such a loss; the passes over the chunks are in
`logit_chunks`. `log_probs` goes through the same chunks without gradients.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from penstock.base.counts import require_count
from penstock.base.errors import BatchError, ConfigError
from penstock.stage.compute.logit_chunks import Chunks, Work, logs_of, wide
from penstock.stage.compute.postponed_logits import PostponedLogits, Shard, local, with_logits

IGNORED = -100
"""Target without a class, as in torch."""

CHUNKS = 8
"""Parts of a microbatch's tokens."""


class LinearCrossEntropy:
    """Loss function: mean cross entropy in nats of a linear head, by chunks of tokens, so that whole logits never exist.

    A `Pipeline` with this loss does not call the head, the last ``nn.Linear`` of the last layer, in training steps and
    evaluations; it may be tied, and the model may scale, cast or cap the logits afterwards. Loss and gradients equal those
    of ``torch.nn.functional.cross_entropy`` of fp32 logits (float64 stays) to summation order. Between the forward and the
    backward of a microbatch a gradient of the weight's size is kept, in fp32, instead of the logits. Called with logits, as
    outside a pipeline, in a compiled stage or with ``outputs=True``, it computes the same loss from them.

    Args:
        chunks: number of parts of the tokens of a microbatch (default 8).
        ignore_index: target that does not count (default -100).
        label_smoothing: share of the target's probability that is spread over the vocabulary (default 0).
        z_loss: weight of the squared logarithm of the softmax's denominator, which is added to each token's loss
            (default 0; PaLM, 2204.02311, has 1e-4).
        shift: whether the target of a position is the next one's, as in `causal_lm_loss` (default False).

    Raises:
        ConfigError: if an argument is out of range.
    """

    postpones_logits = True
    """True if a stage gives the loss a `PostponedLogits` in place of logits; a loss that calls this one sets it, too."""

    def __init__(
        self,
        chunks: int = CHUNKS,
        ignore_index: int = IGNORED,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        *,
        shift: bool = False,
    ) -> None:
        require_count("chunks", chunks)
        if type(ignore_index) is not int:
            raise ConfigError(f"ignore_index must be a whole number, got {ignore_index!r}")
        if not isinstance(label_smoothing, int | float) or not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing must be at least 0 and less than 1, got {label_smoothing!r}")
        if not isinstance(z_loss, int | float) or not 0 <= z_loss < float("inf"):
            raise ConfigError(f"z_loss must be a finite number of at least 0, got {z_loss!r}")
        if type(shift) is not bool:
            raise ConfigError(f"shift must be True or False, got {shift!r}")
        self.chunks = chunks
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.shift = shift

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss; 0 if no target counts.

        Args:
            output: logits of shape (..., vocabulary), or what the head of a pipeline returns instead.
            target: int64 tensor of shape (...).

        Raises:
            BatchError: if the target's shape or dtype is not the one above, or it has a class beyond the vocabulary.
        """
        if not isinstance(output, Tensor):
            raise BatchError(
                f"LinearCrossEntropy takes logits, a tensor of shape (..., vocabulary), and the last layer returned a "
                f"{type(output).__name__}; return the tensor alone, or take a loss function of your own"
            )
        shape, classes = tuple(output.shape[:-1]), output.shape[-1]
        if tuple(self._classes(target).shape) != shape:
            raise BatchError(
                f"the target of LinearCrossEntropy must be int64 of the output's shape without the vocabulary, {shape}; got "
                f"int64 of shape {tuple(target.shape)}"
            )
        target = self._shifted(target)
        counts = target != self.ignore_index
        # On a GPU this would wait for the device, and torch's own assertion is there. FakeTensors have no values.
        if target.device.type == "cpu" and not isinstance(target, FakeTensor):
            _require_classes(target, counts, classes, f"ignore_index={self.ignore_index}")
        target, counts = target.reshape(-1), counts.reshape(-1)
        if not isinstance(output, PostponedLogits):
            return self._from_logits(output.flatten(0, -2), target, counts)
        if output.computed is not None:
            return self._from_logits(output.computed.flatten(0, -2), target, counts)
        output.require_unwritten()
        shard, options = Shard.of(output.weight), (self.chunks, self.label_smoothing, self.z_loss)
        work = Work(target, counts, output.maps, torch.is_grad_enabled(), shard, *options)
        hidden = local(output.hidden, partial_grad=True).flatten(0, -2)
        weight = local(output.weight)
        bias = None if output.bias is None else local(output.bias)
        with output.autocast():
            # torch does not annotate it.
            loss: Tensor = Chunks.apply(hidden, weight, bias, work)  # type: ignore[no-untyped-call]
        return loss

    @property
    def without_shift(self) -> LinearCrossEntropy | None:
        """The same loss of targets that were shifted before; None if it does not shift them."""
        if not self.shift:
            return None
        other = copy.copy(self)
        other.shift = False
        return other

    def valid_targets(self, target: Tensor) -> int:
        """Return the number of targets that count; a `Pipeline` weighs each microbatch by it unless it is told otherwise."""
        return int((self._shifted(self._classes(target)) != self.ignore_index).sum())

    @staticmethod
    def _classes(target: object) -> Tensor:
        if isinstance(target, Tensor) and target.dtype == torch.int64:
            return target
        got = (
            f"{str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}"
            if isinstance(target, Tensor)
            else f"a {type(target).__name__}"
        )
        raise BatchError(
            "the target of LinearCrossEntropy must be an int64 tensor of the output's shape without the vocabulary; got "
            f"{got}. A loss that weighs tokens is a loss function of your own, on logits"
        )

    def _shifted(self, target: Tensor) -> Tensor:
        return F.pad(target[:, 1:], (0, 1), value=self.ignore_index) if self.shift else target

    def _from_logits(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        logits = logits.to(wide(logits))
        loss = F.cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1)[counts].square().sum()
        return loss / counts.sum().clamp(min=1)


def log_probs(output: object, target: Tensor, chunks: int = CHUNKS) -> Tensor:
    """Return the logarithm of each target's probability, in fp32 and of the target's shape; 0 where it is -100.

    Args:
        output: logits of shape (..., vocabulary), or what the head returns in `postponing`.
        target: int64 tensor of shape (...).
        chunks: number of parts of the tokens; probabilities of one part exist at a time.

    Raises:
        BatchError: if the target does not fit the output, or has a class beyond the vocabulary.
    """
    if not isinstance(output, Tensor) or output.shape[:-1] != target.shape:
        what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise BatchError(
            f"log_probs needs logits of shape {(*target.shape, 'vocabulary')} for a microbatch of y of shape "
            f"{tuple(target.shape)}, and the last layer returned {what}; y must have a class for each position"
        )
    counts = (target != IGNORED).reshape(-1)
    target_of_token = target.reshape(-1)
    _require_classes(target, target != IGNORED, output.shape[-1], str(IGNORED))
    found = torch.empty(target.numel(), dtype=torch.float32, device=target.device)
    length = max(1, -(-target.numel() // chunks))
    for start in range(0, target.numel(), length):
        rows = slice(start, start + length)
        if isinstance(output, PostponedLogits) and output.computed is None:
            output.require_unwritten()
            logits, shard = output.of_rows(rows), Shard.of(output.weight)
        else:
            logits, shard = with_logits(output).flatten(0, -2)[rows], None
        logs = logs_of(logits, target_of_token[rows], counts[rows], shard)
        found[rows] = torch.where(counts[rows], logs.of_target, 0)
    return found.view(target.shape)


def _require_classes(target: Tensor, counts: Tensor, classes: int, ignored: str) -> None:
    wrong = (((target < 0) | (target >= classes)) & counts).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise BatchError(
            f"the target has class {int(target[place])} at {[*place]} of the microbatch, and the vocabulary is 0 to "
            f"{classes - 1}; only {ignored} is left out"
        )
