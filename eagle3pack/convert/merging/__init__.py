"""Closed-form merging of key/value heads. `merge` does one layer, in memory, without files."""
