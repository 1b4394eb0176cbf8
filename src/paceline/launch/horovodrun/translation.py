"""Translate the options of Horovod's launcher to those of ``paceline run``. Pure, except for reading the host file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from paceline.command_options import name_of
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.launch.engines.options import EngineFlags
from paceline.launch.engines.ssh import parse_hosts
from paceline.launch.horovodrun.options import HorovodrunOptions, OptionEffect
from paceline.launch.run.options import RunOptions
from paceline.strategies import ElasticFlags, ElasticOptions, StrategyFlags

_VARIABLES: Final = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "PYTHONUNBUFFERED": "1"}
_ELASTIC_FIELDS: Final = ("max_num_proc", "slots", "elastic_timeout", "reset_limit", "cooldown_range")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTranslation:
    """The command of ``paceline run`` for a command of ``horovodrun``."""

    run: RunOptions
    variables: dict[str, str]
    """Variables of the ranks."""
    notes: tuple[str, ...]
    """Notes for the user about options that are not needed."""


def translate(options: HorovodrunOptions, host_name: str, num_slots: int | None = None) -> RunTranslation:
    """Translate a command on the machine `host_name`. Raises UsageError.

    `num_slots` is the number of slots from the host discovery script.
    """
    if options.num_proc is None or not options.command:
        missing = "the program" if options.num_proc else "the number of ranks"
        raise UsageError(f"{missing} is missing. Pass both, for example horovodrun -np 2 python train.py")
    is_elastic = options.min_num_proc is not None or options.host_discovery_script is not None
    _check_together(options, is_elastic=is_elastic)
    variables = dict(_VARIABLES)
    notes: list[str] = []
    for name, value, effect in _effects(options):
        if effect.variable:
            variables[effect.variable] = str(int(value) * effect.factor if isinstance(value, int) else value)
        elif effect.error:
            raise UsageError(f"{name} is not supported: {effect.error}. Leave it out")
        else:
            notes.append(f"{name} is not needed: {effect.note}")
    environment(variables)  # raises UsageError for an invalid value
    hosts = {"localhost": num_slots} if num_slots is not None else _allot(options, is_elastic=is_elastic)
    is_local = len(hosts) == 1 and not {*hosts}.isdisjoint((*LOOPBACK, host_name))
    engine, elastic = EngineFlags(), ElasticFlags()
    ssh = {"Port": options.ssh_port, "IdentityFile": options.ssh_identity_file}
    ssh_options = [f"{name}={value}" for name, value in ssh.items() if value is not None]
    if is_local:
        notes += [f"ssh's {option} is not needed: all ranks are on this machine" for option in ssh_options]
    elif loopback := next((host for host in hosts if host in LOOPBACK), None):
        raise UsageError(f"--hosts: other hosts cannot connect to {loopback}. Pass the name of this machine instead")
    else:
        listed = ",".join(f"[{host}]:{count}" if ":" in host else f"{host}:{count}" for host, count in hosts.items())
        engine = EngineFlags(hosts=listed, ssh_option=ssh_options or None)
    if is_elastic:
        variables["HOROVOD_ELASTIC"] = "1"
        least = options.min_num_proc or options.num_proc
        if least > sum(hosts.values()):
            raise UsageError(f"--min-num-proc {least}: there are only {sum(hosts.values())} slots. Pass a lower number")
        elastic = ElasticFlags(min_ranks=least, max_changes=options.reset_limit)
    run = RunOptions(
        script=options.command[0],
        arguments=options.command[1:],
        no_python=True,
        strategy=ElasticOptions.strategy if is_elastic else None,
        nproc_per_node=sum(hosts.values()) if is_local else None,
        flags=StrategyFlags(elastic=elastic),
        log_dir=options.output_filename,
        engine=engine,
    )
    return RunTranslation(run=run, variables=variables, notes=tuple(notes))


def _effects(options: HorovodrunOptions) -> Iterator[tuple[str, Any, OptionEffect]]:
    """Yield the name, the value and the effect of each given option that has an :class:`OptionEffect`."""
    for each in fields(options):
        value, effect = getattr(options, each.name), each.metadata.get("effect")
        if effect is not None and value is not None and (effect.variable or value is not False):
            yield name_of(each), value, effect


def _check_together(options: HorovodrunOptions, *, is_elastic: bool) -> None:
    names = {each.name: name_of(each) for each in fields(options)}
    for name in _ELASTIC_FIELDS:
        if getattr(options, name) is not None and not is_elastic:
            raise UsageError(f"{names[name]} is for elastic training. Pass --min-np or --host-discovery-script too")
    if options.slots is not None and options.host_discovery_script is None:
        raise UsageError(f"--slots-per-host {options.slots}: needs --host-discovery-script. Leave it out")
    hosts = [name for name in ("hosts", "hostfile", "host_discovery_script") if getattr(options, name) is not None]
    if len(hosts) > 1:
        raise UsageError(f"{names[hosts[0]]} and {names[hosts[1]]} both have the hosts. Leave one of them out")
    most = options.max_num_proc
    if most is not None and most < (options.num_proc or 1):
        raise UsageError(f"--max-num-proc {most}: expected --num-proc ({options.num_proc}) or more")


def _allot(options: HorovodrunOptions, *, is_elastic: bool) -> dict[str, int]:
    """Return the number of ranks on each host, in the order of the hosts. Raises UsageError."""
    num_ranks = options.num_proc or 1
    text = options.hosts or (f"@{options.hostfile}" if options.hostfile else f"localhost:{num_ranks}")
    found = parse_hosts(text)
    if found.num_ranks is None:
        raise UsageError(f"--hosts {text}: the numbers of slots are missing. Pass them, for example a:4,b:4")
    total = sum(found.num_ranks)
    if total < num_ranks:
        found_slots = "1 slot" if total == 1 else f"{total} slots"
        raise UsageError(
            f"--num-proc {num_ranks}: the hosts have {found_slots}. Pass --num-proc {total}, or more hosts"
        )
    left = (options.max_num_proc or total) if is_elastic else num_ranks
    allotted: dict[str, int] = {}
    for host, slots in zip(found.names, found.num_ranks, strict=True):
        if left:
            allotted[host] = min(slots, left)
            left -= allotted[host]
    return allotted
