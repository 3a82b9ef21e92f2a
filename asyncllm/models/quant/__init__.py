"""Quantised weights: what a checkpoint says of them, how it holds them, and how the kernels do.

- ``config``: quantization_config of config.json, typed; imports no torch.
- ``formats``: from the tensors of a matrix in a checkpoint to that matrix as kernels take it.
- ``stored``: which matrices a checkpoint has.
- ``weight``: such a matrix as the weight of a layer.
- ``allocate``: which layers of a model have one.

Where there are no kernels (on a CPU, in float32, for shapes that they do not take, for mixtures of
experts and for output projections) a weight is dequantised when it is loaded.
"""
