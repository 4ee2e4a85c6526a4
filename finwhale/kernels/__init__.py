"""Triton kernels for training on a GPU; each file replaces one operation of `finwhale.ops`.

The one room that imports triton. A kernel keeps the contract of its reference, gives gradients
with it, and says by `..._unsupported(...) -> str | None` what it cannot run; nothing here falls
back to the reference in silence. The easy mistake: a host line that reads a tensor's value
(`.item()`), which breaks CUDA graph capture.
"""
