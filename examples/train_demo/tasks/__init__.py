"""Generators of short dialogues, one module per kind of task."""
