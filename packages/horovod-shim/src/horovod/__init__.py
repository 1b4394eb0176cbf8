"""Horovod's modules as aliases of ``paceline.horovod``."""

from paceline.on_demand import import_on_demand

__version__ = "0.28.1"  # the version of Horovod that has this API
__getattr__ = import_on_demand(__name__, {"paceline.horovod": ("run",)})  # horovodrun does not need PyTorch
