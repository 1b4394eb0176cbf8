"""Call a function on every rank: Horovod's launcher as a function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.command_options import words_of
from paceline.errors import UsageError
from paceline.launch.fork_server import module_command
from paceline.launch.horovodrun.options import HorovodrunOptions

_T = TypeVar("_T")

_OLD_NAMES: Final = {
    "np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc", "network_interface": "network_interfaces",
}  # fmt: skip
_ARGUMENTS: Final = {each.name for each in fields(HorovodrunOptions)} - {
    "command",
    "config_file",
    "check_build",
    "version",
}


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    executable: str | None = None,
    **options: Any,
) -> list[_T]:
    """Call ``func(*args, **kwargs)`` on `num_proc` new ranks; return the values of all ranks, by rank.

    `func` must call :func:`init` to connect the ranks. `options` are the options of ``paceline horovodrun`` with
    underscores, such as ``hosts="a:4,b:4"`` or ``min_num_proc=2``. With other hosts, all hosts must share the current
    folder. `executable` is the Python interpreter of the ranks.

    If `func` raises an exception on a rank, this call raises the same exception. Its cause is a PeerError, which names
    the rank. Raises PeerError if a rank dies, and UsageError for wrong arguments or if cloudpickle is missing.
    """
    try:
        from paceline.launch.functions.call import RankResults, pickle_call
        from paceline.launch.functions.node import run_program
        from paceline.launch.functions.rank import RANK_MODULE
    except ImportError as error:
        raise UsageError(f"hvd.run: {error}. Install it: pip install 'paceline[horovod]'") from None
    given = {_OLD_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    if unknown := given.keys() - _ARGUMENTS:
        raise UsageError(f"hvd.run has no argument {min(unknown)!r}; expected {', '.join(sorted(_ARGUMENTS))}")
    if "cooldown_range" in given:
        given["cooldown_range"] = tuple(given["cooldown_range"])
    if isinstance(given.get("network_interfaces"), list):
        given["network_interfaces"] = ",".join(given["network_interfaces"])
    for each in fields(HorovodrunOptions):
        if each.default is False and each.name in given:  # scripts pass verbose=2
            given[each.name] = bool(given[each.name])
    flags = HorovodrunOptions(**{"num_proc": num_proc, **given})
    program = pickle_call(functools.partial(func, **(kwargs or {})), args)
    command = module_command(
        "paceline", "horovodrun", *words_of(flags), executable or sys.executable, "-m", RANK_MODULE
    )
    hosts = flags.hosts or flags.hostfile
    status, reports = run_program(command, program, {}, shared=None if hosts is None else Path.cwd())
    is_elastic = flags.min_num_proc is not None or flags.host_discovery_script is not None
    num_ranks = len(reports) if is_elastic and status == 0 else flags.num_proc
    results = RankResults([f"hosts {hosts}" if hosts else "local host"], num_ranks or num_proc)
    results.add_end(0, status, reports)
    results.raise_cause()
    return results.load_values()
