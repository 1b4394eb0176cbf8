"""The command ``horovodrun``."""

import sys

from paceline.cli import main


def run_commandline() -> None:
    """Run ``paceline horovodrun``."""
    sys.argv.insert(1, "horovodrun")
    main()
