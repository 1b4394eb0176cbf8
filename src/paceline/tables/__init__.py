"""A process's parts of tables: row stores, update rules, staleness, aggregation. No network."""
