"""A language model of letters over two processes: the embedding and the decoder on one, the LSTM on the other.

    paceline run --strategy all-reduce --nproc-per-node 2 examples/rpc_rnn.py

A model that is too large for one process is cut in three: rank 1 holds the two large tables, embedding and decoder, and
rank 0 the LSTM and the training loop. A step calls rank 1 twice, and the backward pass goes through both processes by
itself. The text is made here: words of a small grammar, so that a few seconds show that it learns.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import rpc

LETTERS = "abcdefgh "
WORDS = ("abc", "bad", "cab", "dead", "egg", "face", "had", "hedge")


class Tables:
    """The parts that have a row for every letter."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(1)
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.decoder = nn.Linear(width, len(LETTERS))

    def embed(self, letters: torch.Tensor) -> torch.Tensor:
        """Return the vectors (float32 [batch, time, width]) of letters (int64 [batch, time])."""
        vectors: torch.Tensor = self.embedding(letters)
        return vectors

    def decode(self, states: torch.Tensor) -> torch.Tensor:
        """Return a score for every letter."""
        scores: torch.Tensor = self.decoder(states)
        return scores

    def parameters(self) -> list[rpc.RRef[Any]]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(each) for module in (self.embedding, self.decoder) for each in module.parameters()]


class LanguageModel(nn.Module):
    """The whole model, on the process with the LSTM."""

    def __init__(self, tables: rpc.RRef[Tables], width: int) -> None:
        super().__init__()
        self.tables = tables
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return scores (float32 [batch, time, letters]) for the letter that follows each one."""
        states, _ = self.lstm(self.tables.rpc_sync().embed(letters))
        scores: torch.Tensor = self.tables.rpc_sync().decode(states)
        return scores

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """Return references to all parameters, local and remote."""
        return [*self.tables.rpc_sync().parameters(), *map(rpc.RRef, self.lstm.parameters())]


def make_text(words: int) -> torch.Tensor:
    """Return the numbers of the letters of a text, always the same one."""
    chosen = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(0))
    text = " ".join(WORDS[int(number)] for number in chosen)
    return torch.tensor([LETTERS.index(letter) for letter in text])


def train(steps: int, width: int, lr: float) -> list[float]:
    """Train; return the loss of each step, in nats per letter."""
    torch.manual_seed(0)
    model = LanguageModel(rpc.remote("tables", Tables, (width,)), width)
    optimizer = rpc.optimizer.DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=lr)
    text, time = make_text(2000), 24
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - time - 1, (16, 1), generator=torch.Generator().manual_seed(step))
        some = text[starts + torch.arange(time + 1)]
        with rpc.autograd.context() as context:
            scores = model(some[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), some[:, 1:].flatten())
            rpc.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Hold the tables, or train."""
    parser = argparse.ArgumentParser(description="Train a small language model over two processes.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2, help="Adam's learning rate")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    told = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("two processes are needed: --nproc-per-node 2")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("trainer", "tables")[rank], allow=["__main__"])
    if rank == 0:
        losses = train(told.steps, told.width, told.lr)
        if told.json:
            print(json.dumps({"first_loss": losses[0], "last_loss": losses[-1]}))
        else:
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} nats per letter, after {told.steps} steps")
    rpc.shutdown()


if __name__ == "__main__":
    main()
