"""The computations of a model's layers and of sampling.

Each function of the modules here runs in Triton on recent GPUs (``kernels.triton``, imported with
the first such tensor), elsewhere in plain torch (``kernels.reference``). All three share
``kernels.types``.
"""
