"""Triton kernels and their launchers, for the functions of ``kernels``.

From Hopper on, consecutive kernels overlap (programmatic dependent launch, PDL): the next one
starts while the last programs of this one run, and may load weights, which no kernel writes. So
every kernel waits before it reads or writes anything else, and lets the next one start as early as
possible.
"""
