"""``paceline run``: start a script as the ranks of a strategy, with the servers it needs."""
