"""Train it on two ranks: python examples/own_gpt/with_penstock.py, or torchrun --nproc-per-node 2 with the same file."""

import torch
from model import GPT, batches

import penstock

with penstock.Pipeline(GPT(), ranks=2, microbatches=4) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for x, y in batches():
        result = pipe.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {result.loss:.4f}")
    torch.save(pipe.full_state_dict(), "gpt.pt")
