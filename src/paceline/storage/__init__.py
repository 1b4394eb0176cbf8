"""Files that outlast a crash: durable writes, checked reads, directories with one writer."""
