"""Triton kernels and their launchers; see the modules of the same names in ``kernels``.

Consecutive kernels overlap (programmatic dependent launch): the next one starts while the last
programs of this one run, and may load what no kernel writes, weights. So every kernel waits before
it reads or writes anything else, and lets the next one start as early as it can.
"""
