"""``paceline manifests``: write the manifests of a command for Kubernetes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Final

import typer

from paceline.errors import UsageError
from paceline.launch.engines.manifests import (
    PodOptions,
    format_manifests,
    manifests_of_cluster,
    manifests_of_run,
    manifests_of_training,
)
from paceline.launch.engines.options import EngineFlags, SlurmFlags
from paceline.launch.run.options import RunOptions

from .parameters import build_flags, expand_flags
from .roles import ClusterFlags

_SET_BY_MANIFESTS: Final = {
    "run": (
        "node_rank", "master_addr", "master_port", "cluster", "job", "index",
        *(field.name for flags in (EngineFlags, SlurmFlags) for field in fields(flags)),
    ),
    "scheduler": ("host", "port", "replaces", "token_file", "tls_cert", "tls_key", "tls_ca"),
    "train": ("scheduler", "token_file", "servers", "workers"),
}  # fmt: skip
"""The commands that run on Kubernetes, and the options that the manifests or the cluster determine."""
_FOR_PODS: Final = {field.name for field in fields(PodOptions)}


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
    """Write the manifests of a command for Kubernetes as YAML, for kubectl apply.

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
    from paceline.launch.run.run import check_script
    from paceline.launch.run.setup import plan_roles
    from paceline.transport.security.authentication import make_token

    if name == "run":
        options = build_flags(RunOptions, "options", values)
        check_script(options, is_here=False)
        plan = plan_roles(options, can_grow=pods.kind == "job")  # raises UsageError for invalid options
        words = ["paceline", *command]
        found = manifests_of_run(pods, make_token(), plan.nodes, words, is_elastic=plan.is_elastic)
    elif name == "scheduler":
        build_flags(ClusterFlags, "cluster", values).parse()  # raises UsageError for invalid settings
        found = manifests_of_cluster(pods, make_token(), values["servers"], values["workers"], arguments)
    else:
        found = manifests_of_training(pods, arguments)
    sys.stdout.write(format_manifests(found))


def _parse(context: typer.Context, name: str, arguments: list[str]) -> Mapping[str, Any]:
    """Parse the arguments of a command without running it; return its values. Raises UsageError and errors of Typer."""
    assert context.parent is not None
    group: Any = context.parent.command
    parsed = group.commands[name].make_context(name, list(arguments), parent=context.parent)
    for parameter in parsed.command.params:
        source = parsed.get_parameter_source(parameter.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if parameter.name in _FOR_PODS:
            raise UsageError(f"{parameter.opts[0]}: pass it before {name}, as in paceline manifests --image me/train:1")
        if parameter.name in _SET_BY_MANIFESTS[name]:
            raise UsageError(f"{parameter.opts[0]}: leave it out, because the manifests or the cluster determine it")
    values: Mapping[str, Any] = parsed.params
    return values
