"""The domain: what an EAGLE3 draft is, whoever produced it, and what it must know of its target.

Nothing here reads a weight or imports torch, numpy or a hub client.
"""
