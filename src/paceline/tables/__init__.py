"""A process's part of tables: stores, update rules, staleness, aggregation. No network."""
