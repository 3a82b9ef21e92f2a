"""What a model's layers compute: on a GPU in kernels of our own, elsewhere in plain torch.

Each module here has one public function, its reference in plain torch, and a counterpart of the
same name in ``kernels.triton``, which is imported when the first tensor on a GPU comes along.
"""
