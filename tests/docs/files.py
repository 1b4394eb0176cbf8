"""Files and names that the examples of the docs use."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

TRAIN = """\
import argparse
from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(256, 8), torch.randint(3, (256,))), batch_size=16)
layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)))
encoder = nn.Sequential(OrderedDict(layers=layers))
model = nn.Sequential(OrderedDict(encoder=encoder, head=nn.Linear(8, 3)))
optimizer = torch.optim.Adam(model.parameters())
loss_fn = nn.CrossEntropyLoss()

strategy = pt.strategy()
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
for _ in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
"""
"""A script for `paceline run`; its model has the modules of the docs' examples."""

TORCH = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), batch_size=16)
model = nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters())
loss_fn = nn.CrossEntropyLoss()
"""
GROUP = """
import contextlib
import os
from tests.free_ports import free_port
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
"""
PRELUDES = {
    "README.md": TORCH,
    "docs/guides/strategies.md": TORCH,
    "docs/guides/elastic.md": TORCH,
    "docs/guides/sharding.md": TORCH + "import paceline.torch as pt\n",
    "docs/guides/pipeline.md": TORCH + "import paceline.torch as pt\n",
    "docs/guides/memory.md": "import paceline\n",
    "docs/guides/filters.md": TORCH
    + GROUP
    + """
import paceline
at_end = contextlib.ExitStack()
client = at_end.enter_context(paceline.local_cluster()).connect()
torch.distributed.init_process_group("gloo")
at_end.callback(torch.distributed.destroy_process_group)
model = nn.parallel.DistributedDataParallel(model)
""",
    "docs/guides/using_models.md": """
import numpy as np
X = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
y, amounts = X[:, 0] > 0, X[:, 1] * 2
""",
    "docs/explanation/collectives.md": GROUP
    + """
import torch
at_end = contextlib.ExitStack()
at_end.callback(lambda: torch.distributed.destroy_process_group())
""",
}
"""Code that defines the names that a page's examples use without defining them."""


def write_files(root: Path) -> None:
    """Write data and scripts to a directory."""
    import pyarrow.csv as arrow_csv
    import pyarrow.parquet as parquet

    from paceline.data import ClickLogSpec, write_click_log

    write_click_log(root / "day1.tsv", ClickLogSpec(rows=3_000, eval_rows=1_000), eval_path=root / "day2.tsv")
    for name in ("day3.tsv", "clicks.tsv", "today.tsv", "tuesday.tsv"):
        shutil.copy(root / "day1.tsv", root / name)
    for name in ("day1.tsv", "day2.tsv"):
        (root / f"{name}.gz").write_bytes(gzip.compress((root / name).read_bytes()))
    rng = np.random.default_rng(0)
    header = "clicked,country,device,ad,hour,site,age,price,title\n"
    rows = [
        f"{int(age > 40)},{country},{device},{ad},{hour},s{ad % 5},{age},{price:.2f},a title of {device} number {ad}\n"
        for age, country, device, ad, hour, price in zip(
            rng.integers(18, 70, 600), rng.choice(["at", "ch", "de"], 600), rng.choice(["phone", "tablet"], 600),
            rng.integers(30, size=600), rng.integers(24, size=600), rng.gamma(2, 3, 600), strict=True,
        )
    ]  # fmt: skip
    for name in ("clicks.csv", "day1.csv", "day2.csv"):
        (root / name).write_text(header + "".join(rows))
    parquet.write_table(arrow_csv.read_csv(root / "clicks.csv"), root / "clicks.parquet")
    (root / "grades.csv").write_text("label,age\n" + "".join(f"{1 + n % 2},{n % 40}\n" for n in range(500)))
    (root / "criteo.ffm").write_text("".join(f"{n % 2} 0:{n % 7}:1 1:{n % 11}:1\n" for n in range(600)))
    (root / "a9a").write_text("".join(f"{1 if n % 3 else -1} {1 + n % 7}:1 {10 + n % 11}:1\n" for n in range(600)))
    (root / "train.py").write_text(TRAIN)
    (root / "script.py").write_text(TRAIN)


def write_models(root: Path) -> None:
    """Train the models that pages use, next to the files."""
    for name, model in (("model", "lr"), ("monday", "lr"), ("deep", "deepfm")):
        words = ["-m", "paceline", "train", "day1.tsv", "--epochs", "1", "--model", model, "--save", name]
        subprocess.run([sys.executable, *words], cwd=root, check=True, capture_output=True)
    shutil.copytree(root / "model", root / "tuesday")
