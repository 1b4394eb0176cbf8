"""``paceline run``: a script started as the ranks of a strategy, with the servers it needs."""
