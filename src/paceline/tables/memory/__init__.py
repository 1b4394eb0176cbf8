"""Memory of tables: pages from the system, and files beyond a limit."""
