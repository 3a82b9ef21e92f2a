"""The models; ``registry`` tells how to add one."""
