"""Decoding on a GPU: a loaded model's weights, pools and steps over `finwhale.decode_kernels`."""
