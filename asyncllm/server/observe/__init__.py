"""What is told of each request when it has ended: a line in the log, a span."""
