"""Handing a converted draft to the framework that retrains it, in that framework's own form.

One module a framework, with `require` (what its release can train) and `write`; `command` chooses. What
each of them reads, and where that was read, is in docs/retraining.md.
"""
