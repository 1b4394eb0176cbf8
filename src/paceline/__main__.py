"""``python -m paceline``."""

from .cli import main

main()
