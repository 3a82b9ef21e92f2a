"""Layers that keep a state of fixed size for each sequence instead of keys and values."""
