"""Train it with torch.distributed.pipelining: torchrun --nproc-per-node 2 examples/own_gpt/torch_pipelining.py"""

import torch
from model import GPT, VOCABULARY, batches
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stage(nn.Module):
    def __init__(self, model, rank, ranks):
        super().__init__()
        self.tokens = model.tokens if rank in (0, ranks - 1) else None
        self.positions = model.positions if rank == 0 else None
        each = len(model.blocks) // ranks
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in range(rank * each, (rank + 1) * each)})
        self.norm = model.norm if rank == ranks - 1 else None

    def forward(self, x):
        if self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None else self.norm(x) @ self.tokens.weight.T


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
module = Stage(GPT(), rank, ranks)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
schedule = Schedule1F1B(PipelineStage(module, rank, ranks, torch.device("cpu")), 4, loss_fn)
ends = dist.new_group([0, ranks - 1])
for x, y in batches():
    losses = []
    schedule.step(*([x] if rank == 0 else []), target=y if rank == ranks - 1 else None, losses=losses)
    if module.tokens is not None:
        dist.all_reduce(module.tokens.weight.grad, group=ends)
    optimizer.step()
    optimizer.zero_grad()
    if rank == ranks - 1:
        print(f"loss {torch.stack(losses).mean().item():.4f}")
parts = [None] * ranks
dist.all_gather_object(parts, module.state_dict())
if rank == 0:
    state = {name: value for part in parts for name, value in part.items()}
    torch.save(state | {"head.weight": state["tokens.weight"]}, "gpt.pt")
dist.destroy_process_group()
