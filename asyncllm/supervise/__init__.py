"""The small process that holds the port, starts the server, and starts it again when it dies."""
