"""Memory of tables: pages of the system, and files beyond a limit."""
