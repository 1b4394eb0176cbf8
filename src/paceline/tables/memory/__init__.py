"""The memory of tables: pages from the system, and files for rows above a memory limit."""
