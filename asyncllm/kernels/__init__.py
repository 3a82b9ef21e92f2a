"""The computations of a model's layers and of sampling.

Each ``in_triton`` function of the modules here is written in plain torch, which is what runs on a
CPU. On recent GPUs the function of the same name in ``kernels.triton`` runs instead; it is imported
with the first such tensor.
"""
