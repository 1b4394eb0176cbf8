"""Files that survive a crash: durable writes, checked reads, directories with one writer."""
