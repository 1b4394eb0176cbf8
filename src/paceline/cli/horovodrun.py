"""``paceline horovodrun``: Horovod's launcher."""

from __future__ import annotations

from dataclasses import fields, replace

import typer

from paceline.launch.horovodrun.options import HorovodrunOptions

from .parameters import build_flags, expand_flags


@expand_flags
def horovodrun(context: typer.Context, *, options: HorovodrunOptions) -> None:
    """Run a program as the ranks of Horovod, with the options of Horovod's launcher.

    Example: paceline horovodrun -np 4 python train.py

    Example: paceline horovodrun -np 8 -H a:4,b:4 python train.py

    Example: paceline horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./slots.sh python train.py
    """
    from paceline.launch.horovodrun.config import read_config
    from paceline.launch.horovodrun.run import run_horovod

    words = [] if options.config_file is None else read_config(options.config_file)
    if words:
        parsed = context.command.make_context("horovodrun", words, parent=context.parent)
        config = build_flags(HorovodrunOptions, "options", parsed.params)
        missing = [each.name for each in fields(options) if getattr(options, each.name) == each.default]
        options = replace(options, **{name: getattr(config, name) for name in missing})
    raise typer.Exit(run_horovod(options))
