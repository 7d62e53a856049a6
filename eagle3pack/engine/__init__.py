"""The draft and its target as PyTorch modules; the only room that imports torch at its top."""
