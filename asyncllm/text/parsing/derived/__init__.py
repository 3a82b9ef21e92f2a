"""Formats made of what a chat template writes for calls and reasoning."""
