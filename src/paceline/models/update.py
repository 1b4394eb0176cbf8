"""Update rules by name, with settings that suit sparse logistic regression."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.ps import FTRL, SGD, Adagrad, Adam, AdamW, Momentum, RMSprop, UpdateRule

_LEARNING_RATES = {
    "ftrl": 0.05,
    "sgd": 0.02,
    "momentum": 0.005,
    "adagrad": 0.05,
    "rmsprop": 0.002,
    "adam": 0.002,
    "adamw": 0.002,
}
UPDATE_NAMES = tuple(_LEARNING_RATES)


def make_update(
    name: str = "ftrl",
    *,
    lr: float | None = None,
    l1: float | None = None,
    l2: float | None = None,
    beta: float | None = None,
) -> UpdateRule:
    """Return an update rule; `lr` is FTRL's alpha, `l2` the others' weight decay. Raises UsageError.

    FTRL's defaults (alpha 0.05, beta 1, l1 1, l2 0) reach the best known result on the Criteo sample.
    """
    rate = _LEARNING_RATES.get(name)
    if rate is None:
        raise UsageError(f"unknown update rule {name!r}: expected one of {', '.join(UPDATE_NAMES)}")
    rate = rate if lr is None else lr
    if name == "ftrl":
        return FTRL(
            alpha=rate,
            beta=1.0 if beta is None else beta,
            l1=1.0 if l1 is None else l1,
            l2=0.0 if l2 is None else l2,
        )
    if l1:
        raise UsageError(f"{name} has no L1 penalty: leave --l1 out, or use --update ftrl")
    if beta is not None:
        raise UsageError(f"--beta is FTRL's: leave it out with --update {name}")
    decay = 0.0 if l2 is None else l2
    rules: dict[str, type[SGD | Momentum | Adagrad | RMSprop | Adam | AdamW]] = {
        "sgd": SGD,
        "momentum": Momentum,
        "adagrad": Adagrad,
        "rmsprop": RMSprop,
        "adam": Adam,
        "adamw": AdamW,
    }
    return rules[name](lr=rate, weight_decay=decay)
