"""Wire format of rpc: messages, values and framed sockets."""
