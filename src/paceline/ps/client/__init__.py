"""A worker's side of parameter servers: the client, its connections and its tables."""
