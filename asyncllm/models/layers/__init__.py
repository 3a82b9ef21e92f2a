"""Building blocks of the models. Each takes its inputs explicitly; there is no global context."""
