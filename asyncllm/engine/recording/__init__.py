"""What ``--trace`` writes: every plan of the scheduler, and what it was made from."""
