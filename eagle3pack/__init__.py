"""Convert, verify and publish EAGLE3 speculative-decoding draft models."""

# A literal: importlib.metadata costs as much to import as click does.
__version__ = "0.1.0"
