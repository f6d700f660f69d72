"""Triton kernels of the fused training path: what lies between the matrix products.

Each file holds kernels of one operation and the Python functions that launch them; autograd lies one level up. All
reduce in fp32, take bf16, fp16 (but for cross-entropy) or fp32, and run in Triton's interpreter (TRITON_INTERPRET=1),
where fp32 and fp16 are right. None uses atomics, so the same inputs give the same bits.
"""
