"""What calls and answers are on a connection: messages, the values that they carry, and how both are sent and read."""
