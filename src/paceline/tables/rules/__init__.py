"""Update rules (optimizers), which servers apply to rows when gradients arrive. One file per rule. See :mod:`.base`."""

from .adadelta import Adadelta
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adamax import Adamax
from .asgd import ASGD
from .base import RULES, UpdateRule
from .ftrl import FTRL
from .momentum import Momentum
from .nadam import NAdam
from .proximal import ProximalNewton
from .radam import RAdam
from .rmsprop import RMSprop
from .rprop import Rprop
from .sgd import SGD

__all__ = [
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "FTRL",
    "Momentum",
    "NAdam",
    "ProximalNewton",
    "RAdam",
    "RMSprop",
    "RULES",
    "Rprop",
    "SGD",
    "UpdateRule",
]
