"""Preference pairs (DPO) through a Pipeline: a small Llama learns to prefer one answer of two.

python examples/dpo.py                                      two ranks as threads of this process

Rows come in pairs, the chosen answer before the rejected one, and every microbatch has whole pairs. The model before
training is the reference: evaluations compute its log-probabilities once, so no second model is kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

BETA, LEARNING_RATE = 0.1, 3e-3
EPOCHS, BATCHES, PAIRS, MICROBATCHES = 3, 4, 8, 4
PROMPT, TOKENS = 4, 12


def preferences(generator: torch.Generator) -> dict[str, Tensor]:
    """Return a batch of pairs, int64 (2 * PAIRS, TOKENS): the chosen answer has even tokens, the rejected one odd ones."""
    prompts = torch.randint(2, 64, (PAIRS, PROMPT), generator=generator).repeat_interleave(2, dim=0)
    answers = 2 * torch.randint(1, 32, (2 * PAIRS, TOKENS - PROMPT), generator=generator)
    answers[1::2] += 1
    ids = torch.cat((prompts, answers), dim=1)
    mask = torch.ones_like(ids)
    mask[::3, -2:] = 0  # some answers are shorter
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each row's answer, float32 (rows,); labels of -100 are no part of it."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return -F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").sum(dim=1)


def dpo_loss(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a microbatch's pairs: equation 7 of Rafailov et al. 2023, arXiv:2305.18290.

    Args:
        target: labels, (rows, tokens), and the reference's log-probabilities, (rows,).
    """
    labels, reference = target
    gain = log_probabilities(logits, labels) - reference
    chosen, rejected = gain.view(-1, 2).unbind(dim=1)  # an error if a pair is not whole
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def pairs(target: tuple[Tensor, Tensor]) -> int:
    """Return the weight of a microbatch: its pairs, not the tokens of its labels."""
    return len(target[1]) // 2


def train(model: LlamaForCausalLM, batches: list[dict[str, Tensor]]) -> list[float]:
    """Train a model on batches of pairs; return the loss of every step."""
    losses = []
    layers = penstock.from_transformers(model)
    with penstock.Pipeline(layers, dpo_loss, reduction=pairs, ranks=2, microbatches=MICROBATCHES) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=LEARNING_RATE)
        references = []
        for batch in batches:
            result = pipe.evaluate(batch["input_ids"], outputs=True, attention_mask=batch["attention_mask"])
            references.append(log_probabilities(torch.cat(result.outputs), batch["labels"]))
        for _ in range(EPOCHS):
            for batch, reference in zip(batches, references, strict=True):
                target = batch["labels"], reference
                result = pipe.step(batch["input_ids"], target, attention_mask=batch["attention_mask"])
                optimizer.step()
                losses.append(result.loss.item())
    return losses


def small_model() -> LlamaForCausalLM:
    """Return a small random Llama; for your own, take ``AutoModelForCausalLM.from_pretrained``."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for step, loss in enumerate(train(small_model(), [preferences(generator) for _ in range(BATCHES)])):
        print(f"step {step + 1}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
