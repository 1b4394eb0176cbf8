"""The part of each table that one process holds: row stores, update rules, staleness, aggregation. No network."""
