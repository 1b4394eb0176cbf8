"""Train a character language model under any strategy: an LSTM reads text and predicts the next character.

    paceline run --strategy parameter-server --servers 1 --nproc-per-node 2 examples/charlm.py --data input.txt

The file is any text in UTF-8 of about a megabyte, for example "tiny Shakespeare". Nine tenths of the text are for
training, and the rest is for the validation loss, in nats per character. The batch size is per rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import paceline.torch as pt


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of `length` characters. The target of each is the piece that begins one character later."""

    def __init__(self, codes: torch.Tensor, length: int) -> None:
        self.codes = codes
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.codes) - 1) // self.length)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self.length
        piece = self.codes[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class CharacterModel(nn.Module):
    """A model from codes [batch, time] to scores [batch, time, characters]."""

    def __init__(self, num_characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, num_characters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        states, _ = self.lstm(self.embedding(codes))
        scores: torch.Tensor = self.head(states)
        return scores


def loss_of(model: nn.Module, codes: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per character, in nats."""
    return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())


def main() -> None:
    """Train, validate after each epoch, and print the results."""
    parser = argparse.ArgumentParser(description="Train a character language model.")
    parser.add_argument("--data", type=Path, required=True, help="a text file in UTF-8")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text, per rank")
    parser.add_argument("--length", type=int, default=64, help="characters of a piece")
    parser.add_argument("--width", type=int, default=128, help="width of the LSTM")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate at the start")
    parser.add_argument("--clip", type=float, default=1.0, help="the maximum norm of the gradient")
    parser.add_argument("--limit", type=int, help="read only this many characters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    options = parser.parse_args()
    try:
        text = options.data.read_text("utf-8")[: options.limit]
    except (OSError, ValueError) as error:
        sys.exit(f"charlm.py: cannot read {options.data}: {getattr(error, 'strerror', None) or error}")

    strategy = pt.strategy(seed=options.seed)
    torch.manual_seed(options.seed)
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    codes = torch.tensor([number_of[character] for character in text])
    split = len(codes) * 9 // 10
    held_out = Windows(codes[split:], options.length)
    model = CharacterModel(len(characters), options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(Windows(codes[:split], options.length), options.batch_size, shuffle=True, drop_last=True)
    num_steps = options.epochs * (len(loader) // strategy.world_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps))
    model, optimizer, loader, scheduler = strategy.prepare(model, optimizer, loader, scheduler)
    validation = strategy.prepare_loader(DataLoader(held_out, options.batch_size))

    loss, seconds, examples = float("nan"), 0.0, 0
    for epoch in range(options.epochs):
        began = time.perf_counter()
        model.train()
        for codes_in, following in loader:
            optimizer.zero_grad()
            loss_of(model, codes_in, following).backward()
            strategy.clip_grad_norm_(options.clip)
            optimizer.step()
            scheduler.step()
            examples += codes_in.numel()
        seconds += time.perf_counter() - began
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, codes_in, following).item() for codes_in, following in validation]
        loss = strategy.reduce(sum(losses) / len(losses))
        if not options.json:
            strategy.print(f"epoch {epoch + 1}: validation loss {loss:.3f} nats, {seconds:.1f} s of training")
    rate = strategy.reduce(examples, "sum") / strategy.reduce(seconds, "max")
    if options.json:
        strategy.print(json.dumps({"loss": loss, "seconds": seconds, "examples_per_s": rate}))
    strategy.close()


if __name__ == "__main__":
    main()
