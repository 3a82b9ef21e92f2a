"""Quantised weights: their settings (``config``), formats on disk, and weights of layers.

A weight is dequantised at loading where there are no kernels for it: on a CPU, in float32, for
unsupported shapes, experts and output projections.
"""
