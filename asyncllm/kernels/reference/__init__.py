"""The kernels in plain torch: what runs on a CPU, and what tests compare kernels with."""
