"""Files that survive a crash: durable writes, verified reads, and directories with a single writer."""
