"""The launcher."""

from paceline.on_demand import import_on_demand

__getattr__ = import_on_demand(__name__, {"paceline.horovod": ("run",)})
