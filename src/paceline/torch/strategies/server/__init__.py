"""The `ParameterServer` strategy: dense tables, staging and the optimizer on the servers."""
