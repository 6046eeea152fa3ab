"""A model on several GPUs: every rank observes its share of the old data, then the model is sharded and trained.

    torchrun --standalone --nproc-per-node 2 examples/several_gpus.py

On GPUs it uses NCCL, without them gloo, so that the same command tries it on a CPU.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ness

kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

torch.manual_seed(0)  # the same weights on every rank; a real model is loaded from its file
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).to(kind)
old = torch.randn(1000, 16) @ torch.randn(16, 64)  # old inputs lie in 16 of 64 dimensions
new = torch.randn(256, 64)

# 1. observe: each rank its share, whole batches at a time; Grams are summed over all ranks
guard = ness.NullSpace(model, rule=ness.Within(0.01))
guard.observe(old[rank::ranks].to(kind).split(125))
before = model(old.to(kind)).detach()

# 2. constrain, and only then shard
guard.constrain()
mesh = init_device_mesh(kind, (ranks,))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

# 3. train as ever: each rank on its share of the new data
optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-3)
for _ in range(50):
    optimizer.zero_grad()
    loss = (model(new[rank::ranks].to(kind)) - 1).square().mean()
    loss.backward()
    optimizer.step()

# 4. all ranks ask for the certificate and the file; rank 0 writes it
certificate = guard.certificate()
moved = (model(old.to(kind)) - before).norm() / before.norm()
with tempfile.TemporaryDirectory() as folder:
    guard.save(f"{folder}/guard")
if rank == 0:
    print(f"{ranks} ranks on {kind}: within its bounds: {certificate.holds}; old outputs moved by {100 * moved:.1f} %")
dist.destroy_process_group()
