"""Train the model of `model.py` with plain PyTorch: python examples/own_gpt/plain.py"""

import torch
from model import GPT, batches

model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in batches():
    logits, loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
torch.save(model.state_dict(), "gpt.pt")
