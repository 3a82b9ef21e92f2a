"""How connections come to the process."""
