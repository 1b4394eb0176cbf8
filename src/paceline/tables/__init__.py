"""A process's parts of tables: stores, update rules, staleness, aggregation. No network."""
