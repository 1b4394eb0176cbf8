"""Where the values of tables lie: pages of the system, and files beyond a limit."""
