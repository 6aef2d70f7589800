"""CUDA tensors: the GPU leg of the core in this process, as the rest of the library sees it.

``seam`` is what is asked of torch.cuda and is always there; everything else is imported when the first CUDA tensor or
parameter comes.
"""
