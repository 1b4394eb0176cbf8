"""``paceline doctor``."""

from __future__ import annotations

import dataclasses
import json as json_module

import typer

from . import options


def doctor(json: options.Json = False) -> None:
    """Report the state of this machine, problems and their remedies; exit status 1 after a failed check.

    Example: paceline doctor
    """
    from paceline.launch.doctor import examine

    failed = False
    for finding in examine():
        failed |= finding.status == "fail"
        if json:
            typer.echo(json_module.dumps(dataclasses.asdict(finding)))
        else:
            advice = f": {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.status:5} {finding.what:22} {finding.found}{advice}")
    raise typer.Exit(1 if failed else 0)
