"""Bytes: safetensors headers, shards, streaming copies, atomic folders, digests.

Own code over the safetensors *format*, because unchanged tensors are copied inside the kernel and
never loaded. Nothing here imports torch (but for reading a pickle) or a hub client.
"""
