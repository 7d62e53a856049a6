"""The model card, and one atomic commit a hub."""
