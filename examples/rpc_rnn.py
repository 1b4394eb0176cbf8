"""Train a language model over two processes: one has the embedding and the decoder, the other has the LSTM.

    paceline run --strategy all-reduce --nproc-per-node 2 examples/rpc_rnn.py

A model that is too large for one process is cut into three parts. Rank 1 has the two large tables, the embedding and
the decoder. Rank 0 has the LSTM and the training loop. A step calls rank 1 twice, and `rpc.autograd` runs the backward
pass through both processes. The training text is generated from a few words, so the loss decreases within seconds.
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
    """The embedding and the decoder: they have a row for each letter."""

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
        return [rpc.RRef(parameter) for module in (self.embedding, self.decoder) for parameter in module.parameters()]


class LanguageModel(nn.Module):
    """The whole model, on the process with the LSTM."""

    def __init__(self, tables: rpc.RRef[Tables], width: int) -> None:
        super().__init__()
        self.tables = tables
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return scores (float32 [batch, time, letters]) for the next letter at each position."""
        states, _ = self.lstm(self.tables.rpc_sync().embed(letters))
        scores: torch.Tensor = self.tables.rpc_sync().decode(states)
        return scores

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """Return references to all parameters, local and remote."""
        return [*self.tables.rpc_sync().parameters(), *map(rpc.RRef, self.lstm.parameters())]


def make_text(words: int) -> torch.Tensor:
    """Return the numbers of the letters of a text, always the same text."""
    chosen = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(0))
    text = " ".join(WORDS[int(number)] for number in chosen)
    return torch.tensor([LETTERS.index(letter) for letter in text])


def train(steps: int, width: int, lr: float) -> list[float]:
    """Train. Return the loss of each step, in nats per letter."""
    torch.manual_seed(0)
    model = LanguageModel(rpc.remote("tables", Tables, (width,)), width)
    optimizer = rpc.optimizer.DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=lr)
    text, time = make_text(2000), 24
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - time - 1, (16, 1), generator=torch.Generator().manual_seed(step))
        letters = text[starts + torch.arange(time + 1)]
        with rpc.autograd.context() as context:
            scores = model(letters[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())
            rpc.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Serve the tables or train, depending on the rank."""
    parser = argparse.ArgumentParser(description="Train a small language model over two processes.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2, help="Adam's learning rate")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    options = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("two processes are needed: --nproc-per-node 2")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("trainer", "tables")[rank], allow=["__main__"])
    if rank == 0:
        losses = train(options.steps, options.width, options.lr)
        if options.json:
            print(json.dumps({"first_loss": losses[0], "last_loss": losses[-1]}))
        else:
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} nats per letter, after {options.steps} steps")
    rpc.shutdown()


if __name__ == "__main__":
    main()
