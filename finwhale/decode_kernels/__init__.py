"""Triton kernels for one decode step on a GPU: one token per sequence, packed rows, no gradient.

Beside `kernels`, which serves training: here the inputs are the bytes of the engine's pools and
block tables, and T counts sequences. Each file holds one operation with its torch reference of the
same signature; launch parameters come from `launch.py`, by device family, and nothing is tuned at
run time. The easy mistake: a host line that reads a tensor's value (`.item()`), which breaks CUDA
graph capture.
"""
