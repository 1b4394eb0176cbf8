"""How a worker reads the shards that it leases: several at a time, or from memory where it has read them before."""
