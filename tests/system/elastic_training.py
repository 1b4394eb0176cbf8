"""A script that trains elastically, and checks of its output."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from .running import Finished

NUM_ITEMS = 120
BATCH_SIZE = 4
TRAIN = """
import itertools, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt

victims = {int(number) for number in sys.argv[1].split(",") if number}
last = int(sys.argv[2])
if "PACELINE_INCARNATION" in os.environ:
    incarnation = int(os.environ["PACELINE_INCARNATION"])
else:
    number, restarts = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"))
    incarnation = int(sys.argv[3]) + number + 10 * restarts
strategy = pt.strategy(bucket_mb=0.0001)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(x, y, torch.arange(len(x)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
model, optimizer, loader, scheduler = strategy.prepare(model, optimizer, loader, scheduler)
average = torch.optim.swa_utils.AveragedModel(strategy.module)

class Counter:
    num_steps = 0

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]

counter, noise = Counter(), torch.Generator()
noise.manual_seed(0 if strategy.has_joined else incarnation)
for name, state in (("average", average), ("counter", counter), ("noise", noise)):
    strategy.register_state(name, state)
num_steps = 0

def die(_):  # in the middle of backward: the all-reduce of the last layers has begun
    if incarnation in victims and num_steps >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

strategy.module[2].weight.register_hook(die)
print("starts", incarnation, os.getpid(), flush=True)
items = open(f"items{incarnation}", "a", buffering=1)
for epoch in itertools.count():
    for inputs, targets, numbers in loader:
        is_alone = not strategy.has_joined
        time.sleep(0.02)  # the ranks train until other ranks have started, and would use all cores
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        average.update_parameters(model)
        counter.num_steps += 1
        if not is_alone:
            num_steps += 1
            for number in numbers.tolist():
                items.write(f"{epoch} {number}\\n")
            if incarnation == last and num_steps == 5:
                Path("done").touch()
    scheduler.step()
    if strategy.has_joined and strategy.reduce(float(epoch >= 5 and os.path.exists("done")), "min"):
        break
values = torch.cat([tensor.detach().reshape(-1) for tensor in (*model.parameters(), *model.buffers())])
with torch.no_grad():
    loss = nn.functional.mse_loss(model(x), y).item()
own = [counter.num_steps, next(average.parameters()).double().sum().item(), torch.rand(1, generator=noise).item()]
own = "/".join(map(repr, [optimizer.param_groups[0]["lr"], *own]))
moments = sum(entry["exp_avg"].double().sum().item() for entry in optimizer.state.values())
ending = f"ends {incarnation} {epoch} {values.double().sum().item()!r} {moments!r} {own} loss={loss}"
print(f"{ending}\\n", end="", flush=True)  # one write, because the ranks of a torchrun share a pipe
"""
"""Arguments: the incarnations to kill, the incarnation that must join before the end, and, without ``paceline run``,
the incarnation of this process, or of the first process of this torchrun.
"""


def ends(finished: Finished) -> dict[int, tuple[str, ...]]:
    """Return the last lines of the ranks by incarnation."""
    found = re.findall(r"ends (\d+) (\d+ \S+ \S+ \S+) loss=(\S+)", finished.out)
    return {int(incarnation): (state, loss) for incarnation, state, loss in found}


def check_items(folder: Path, *, num_killed: int = 0) -> None:
    """Check that each epoch's items were used once, except for the repetitions at the end of an epoch.

    Each of the `num_killed` ranks that were killed at an arbitrary time may have used a batch that it has not written
    to its file.
    """
    num_missing = 0
    used: dict[str, Counter[str]] = {}
    for path in folder.glob("items*"):
        for line in path.read_text().splitlines():
            epoch, number = line.split()
            used.setdefault(epoch, Counter())[number] += 1
    assert len(used) >= 6
    for epoch, counts in used.items():
        num_missing += NUM_ITEMS - len(counts)
        assert counts.total() < NUM_ITEMS + 12, (epoch, counts.total())
    assert num_missing <= num_killed * BATCH_SIZE
