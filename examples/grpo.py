"""Reinforcement learning in the shape of GRPO, with a function in place of the engine that samples.

A small policy learns to answer with the token 7. Prints the mean reward of each round.

    python examples/grpo.py

In processes, `pipe.named_weights(rank0_only=True)` feeds one engine; give its samples to all processes. A reference model is
a Pipeline of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import penstock

WIDTH = 16


def policy() -> nn.Sequential:
    """Return a model of eight tokens."""
    return nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))


def sample(weights: Iterable[tuple[str, Tensor]], ids: Tensor) -> Tensor:
    """Return prompts (answers, tokens) with six tokens drawn after each, by an engine that gets the weights."""
    engine = policy()
    engine.load_state_dict(dict(weights))
    for _ in range(6):
        chances = engine(ids)[:, -1].detach().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
    return ids


def grpo_loss(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Return the clipped loss, a mean over all tokens of answers."""
    index = target["y"].clamp(min=0).unsqueeze(-1)
    log_p = logits.log_softmax(-1).gather(-1, index).squeeze(-1)
    ratio, gain = (log_p - target["old"]).exp(), target["gain"].unsqueeze(-1)
    gained = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -gained[target["y"] >= 0].mean()


def main() -> None:
    """Train for ten rounds of two updates each."""
    torch.manual_seed(0)
    prompts = torch.randint(8, (4, 3)).repeat_interleave(8, 0)  # groups of 8 answers
    with penstock.Pipeline(policy(), grpo_loss, ranks=2, microbatches=4) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.02)
        for _ in range(10):
            ids = sample(pipe.named_weights(), prompts)
            x, y = ids[:, :-1], ids[:, 1:].clone()
            y[:, :2] = -100  # the prompt
            reward = (ids[:, 3:] == 7).float().mean(1).view(4, 8)
            gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
            target = {"y": y, "old": pipe.log_probs(x, y), "gain": gain.flatten()}
            for _ in range(2):
                pipe.step(x, target)
                optimizer.step()
            print(f"reward {reward.mean():.3f}")


if __name__ == "__main__":
    main()
