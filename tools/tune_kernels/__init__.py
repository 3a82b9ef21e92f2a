"""A developer's tool: measures which kernel and tile each projection of a model runs best on.

    python -m tools.tune_kernels MODEL [--tp N]

For batches of up to 256 rows, on this GPU, which must be idle; it takes minutes. The result is kept
in the user's cache folder, where ``asyncllm.kernels.tuning`` finds it, or, moved to
``asyncllm/kernels/tuned``, ships with the package.
"""
