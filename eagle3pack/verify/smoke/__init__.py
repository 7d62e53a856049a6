"""Run a draft in an engine and measure what it is worth there.

Engines stand behind one small protocol (`protocol.Engine`): PyTorch in this process, a `vllm serve`
that we start and end, or a server that runs already. What is measured, compared and probed knows only
that protocol.
"""
