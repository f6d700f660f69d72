"""The fused training path for CUDA: each half of a block is one autograd function over Triton kernels and libraries,
and so are the embedding and the norm before the head.

It computes what the reference modules compute, with the same parameters; `gpt_oss_lite.model.transformer` chooses.
"""
