"""The options of ``paceline horovodrun``, which are those of Horovod's launcher, and their effects.

The module :mod:`.translation` applies the effects, and translates the options without an effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.command_options import argument, option

_COMMON, _HOSTS, _ELASTIC, _HOROVOD, _OTHER = "Common options", "Hosts", "Elastic", "Horovod", "Accepted or rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionEffect:
    """The effect of an option: a variable, a note or an error."""

    variable: str = ""
    """A variable of the ranks. Its value is the value of the option times `factor`."""
    factor: int = 1
    note: str = ""
    """The reason why the option is not needed. It is accepted with a note."""
    error: str = ""
    """The reason why the option is not supported."""


def _variable(name: str, help: str, *names: str, factor: int = 1, panel: str = _HOROVOD, **settings: Any) -> Any:
    effect = OptionEffect(variable=f"HOROVOD_{name}", factor=factor)
    return option(help, *names, panel=panel, effect=effect, **settings)


def _not_needed(note: str, *names: str, **settings: Any) -> Any:
    return option(f"Not needed: {note}.", *names, panel=_OTHER, effect=OptionEffect(note=note), **settings)


def _not_supported(error: str, *names: str) -> Any:
    return option(f"Not supported: {error}.", *names, panel=_OTHER, effect=OptionEffect(error=error))


_MPI: Final = "Paceline does not use MPI"
_ALGORITHM: Final = "Paceline chooses the algorithm by measurement"
_AUTOTUNE: Final = "Paceline tunes its collectives by measurement"


@dataclass(frozen=True, kw_only=True)
class HorovodrunOptions:
    """The user's options; None for missing options. The fields have Horovod's names."""

    command: list[str] | None = argument("Program of each rank, with its arguments.", show_default=False)
    num_proc: int | None = option(
        "Number of ranks; with elastic options, at least.", "--num-proc", "-np", min=1, panel=_COMMON
    )
    config_file: Path | None = option("YAML file of options. The command line has precedence.", panel=_COMMON)
    output_filename: Path | None = option("Folder for the output: rank.0/stdout, rank.0/stderr, ...", panel=_COMMON)
    start_timeout: int | None = _variable(
        "START_TIMEOUT", "Seconds until all ranks are connected; default 300.", min=1, panel=_COMMON
    )
    version: bool = option("Show the version.", "--version", "-v", default=False, panel=_COMMON)
    verbose: bool = option("Print the command of paceline run.", "--verbose", default=False, panel=_COMMON)
    check_build: bool = option("Show the available parts.", "--check-build", "-cb", default=False, panel=_COMMON)

    hosts: str | None = option(
        "Hosts and numbers of ranks, such as a:4,b:4; default: localhost.", "--hosts", "-H", panel=_HOSTS
    )
    hostfile: Path | None = option("File with a line 'HOST slots=N' per host.", "--hostfile", "-hostfile", panel=_HOSTS)
    ssh_port: int | None = option("Port of ssh on all hosts.", "--ssh-port", "-p", min=1, max=65535, panel=_HOSTS)
    ssh_identity_file: Path | None = option("Private key of ssh.", "--ssh-identity-file", "-i", panel=_HOSTS)

    min_num_proc: int | None = option(
        "Smallest number of ranks; default: --num-proc.", "--min-num-proc", "--min-np", min=1, panel=_ELASTIC
    )
    max_num_proc: int | None = option(
        "Largest number of ranks; default: the number of slots.", "--max-num-proc", "--max-np", min=1, panel=_ELASTIC
    )
    host_discovery_script: str | None = option(
        "Command that prints this machine's slots, such as localhost:4. It runs every second.", panel=_ELASTIC
    )
    slots: int | None = option(
        "Number of slots, if the discovery script prints none.", "--slots-per-host", min=1, panel=_ELASTIC
    )
    elastic_timeout: int | None = _variable(
        "ELASTIC_TIMEOUT", "Seconds until enough ranks are available; default 600.", min=1, panel=_ELASTIC
    )
    reset_limit: int | None = option(
        "End the training if the set of ranks changes more often than this; default: no limit.", min=0, panel=_ELASTIC
    )

    fusion_threshold_mb: int | None = _variable(
        "FUSION_THRESHOLD", "MiB up to which small all-reduces are fused; default 128.", factor=1 << 20, min=0
    )
    cache_capacity: int | None = _variable("CACHE_CAPACITY", "Size of the response cache; default 1024.", min=0)
    timeline_filename: str | None = _variable("TIMELINE", "File for the timeline.")
    timeline_mark_cycles: bool | None = _variable(
        "TIMELINE_MARK_CYCLES", "Mark negotiations.", "--timeline-mark-cycles/--no-timeline-mark-cycles"
    )
    no_stall_check: bool | None = _variable(
        "STALL_CHECK_DISABLE", "Do not warn of operations that wait for ranks.", "--no-stall-check/--stall-check"
    )
    stall_check_warning_time_seconds: int | None = _variable(
        "STALL_CHECK_TIME_SECONDS", "Warn of an operation that waits for ranks for this time; default 60.", min=0
    )
    stall_check_shutdown_time_seconds: int | None = _variable(
        "STALL_SHUTDOWN_TIME_SECONDS", "End an operation that waits for this time; default 0: never.", min=0
    )
    gloo_timeout_seconds: int | None = _variable("GLOO_TIMEOUT_SECONDS", "Limit of an operation; default 300.", min=1)
    log_level: str | None = _variable("LOG_LEVEL", "TRACE, DEBUG, INFO, WARNING (default), ERROR or FATAL.")

    cooldown_range: tuple[int, int] | None = _not_needed(
        "no host is excluded after a failure", "--blacklist-cooldown-range", metavar="MIN MAX"
    )
    use_gloo: bool = _not_needed("Paceline's collectives replace Gloo", "--gloo", default=False)
    use_mpi: bool = _not_needed("Paceline's collectives replace MPI", "--mpi", default=False)
    tcp_flag: bool = _not_needed(_MPI, "--tcp", default=False)
    mpi_threads_disable: bool | None = _not_needed(_MPI, "--mpi-threads-disable/--no-mpi-threads-disable")
    disable_cache: bool = _not_needed("Paceline checks the hosts at each start", "--disable-cache", default=False)
    network_interfaces: str | None = _not_needed(
        "ranks use the network interface of the route to the first host", "--network-interfaces", "--network-interface"
    )
    cycle_time_ms: float | None = _not_needed("ranks exchange requests immediately, without cycles", min=0)
    autotune: bool | None = _not_needed(_AUTOTUNE, "--autotune/--no-autotune")
    autotune_log_file: str | None = _not_needed(_AUTOTUNE)
    autotune_warmup_samples: int | None = _not_needed(_AUTOTUNE, min=0)
    autotune_steps_per_sample: int | None = _not_needed(_AUTOTUNE, min=0)
    autotune_bayes_opt_max_samples: int | None = _not_needed(_AUTOTUNE, min=0)
    autotune_gaussian_process_noise: float | None = _not_needed(_AUTOTUNE, min=0, max=1)
    hierarchical_allreduce: bool | None = _not_needed(
        _ALGORITHM, "--hierarchical-allreduce/--no-hierarchical-allreduce"
    )
    hierarchical_allgather: bool | None = _not_needed(
        _ALGORITHM, "--hierarchical-allgather/--no-hierarchical-allgather"
    )
    torus_allreduce: bool | None = _not_needed(_ALGORITHM, "--torus-allreduce/--no-torus-allreduce")
    thread_affinity: int | None = _not_needed("the background threads sleep between requests", min=0)
    num_nccl_streams: int | None = _not_needed("tensors are reduced in the host's memory", min=0)
    log_with_timestamp: bool | None = _not_supported(
        "messages have no time", "--log-with-timestamp/--log-without-timestamp"
    )
    use_jsrun: bool | None = _not_supported(_MPI, "--jsrun")
    mpi_args: str | None = _not_supported(_MPI)
    binding_args: str | None = _not_supported(_MPI)
