"""The strategy `ParameterServer`: parameters in dense tables, copies to and from messages, updates on the servers."""
