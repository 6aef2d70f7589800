"""CUDA tensors: the GPU leg of the core in this process, as the rest of the library sees it."""
