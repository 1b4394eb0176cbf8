"""What a process holds of a table: stores, update rules, staleness, aggregation. No network."""
