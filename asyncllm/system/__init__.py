"""Child processes, threads, the event loop, terminals and log lines: nothing about models."""
