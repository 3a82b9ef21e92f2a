"""Measuring, predicting and replaying. No server needs it."""
