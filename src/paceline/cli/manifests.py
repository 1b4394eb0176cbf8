"""``paceline manifests``: write the manifests of a command for Kubernetes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from paceline.errors import UsageError
from paceline.launch.engines.kubernetes import (
    PodOptions,
    manifests_of_cluster,
    manifests_of_run,
    manifests_of_training,
)

from .parameters import expand_flags

_SET_BY_MANIFESTS: Final = {
    "run": ("on", "node_rank", "master_addr", "master_port", "cluster", "job", "index"),
    "scheduler": ("host", "port", "replaces", "token_file"),
    "train": ("scheduler", "token_file", "servers", "workers"),
}
"""The commands that run on Kubernetes, and the options that the manifests or the cluster determine."""


@expand_flags
def manifests(
    context: typer.Context,
    *,
    command: Annotated[
        list[str],
        typer.Argument(
            help="run OPTIONS SCRIPT ARGUMENTS, scheduler OPTIONS or train OPTIONS DATA: as for paceline.",
            show_default=False,
        ),
    ],
    pods: PodOptions,
) -> None:
    """Write the manifests of a command for Kubernetes as YAML; kubectl applies them.

    run makes a Job of --nnodes pods. scheduler makes a cluster with a scheduler, servers and workers, and train a Job
    that trains a click model on the cluster of the same --name.

    Example: paceline manifests --image me/train:1 --cpus 4 run --nnodes 4 --strategy all-reduce train.py | kubectl
    apply -f -

    Example: paceline manifests --image me/train:1 scheduler --servers 3 --workers 6 --replicas 1 > cluster.yaml
    """
    name, *arguments = command
    if name not in _SET_BY_MANIFESTS:
        raise UsageError(f"{name}: expected run, scheduler or train, as in paceline manifests --image me/train:1 run")
    values = _parse(context, name, arguments)
    if pods.kind != "job" and name != "run":
        raise UsageError(f"--kind {pods.kind} is only for paceline manifests run. For {name}, leave --kind out")
    from paceline.transport.security.authentication import make_token

    if name == "run":
        found = manifests_of_run(pods, make_token(), values["nnodes"] or 1, arguments)
    elif name == "scheduler":
        found = manifests_of_cluster(pods, make_token(), values["servers"], values["workers"], arguments)
    else:
        found = manifests_of_training(pods, arguments)
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "paceline manifests needs PyYAML, which is not installed: pip install 'paceline[kubernetes]'"
        ) from None
    yaml.safe_dump_all(found, sys.stdout, sort_keys=False, width=1000)


def _parse(context: typer.Context, name: str, arguments: list[str]) -> Mapping[str, Any]:
    """Parse the arguments of a command without running it; return its values. Raises UsageError and errors of Typer."""
    assert context.parent is not None
    group: Any = context.parent.command
    parsed = group.commands[name].make_context(name, list(arguments), parent=context.parent)
    for parameter in parsed.command.params:
        source = parsed.get_parameter_source(parameter.name)
        if parameter.name in _SET_BY_MANIFESTS[name] and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]}: leave it out, because the manifests or the cluster determine it")
    values: Mapping[str, Any] = parsed.params
    return values
