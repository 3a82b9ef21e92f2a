"""JSON Schema: see ``writer`` for how a schema becomes a grammar."""
