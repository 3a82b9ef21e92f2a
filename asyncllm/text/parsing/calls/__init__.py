"""Reading calls: a name, and arguments in JSON, in tags of their own or in Python."""
