"""Predicted memory and speed of a model on GPUs that need not be here."""
