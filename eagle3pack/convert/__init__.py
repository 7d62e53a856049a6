"""MHA to GQA: planning, merging key/value heads, streaming execution, the conversion record."""
