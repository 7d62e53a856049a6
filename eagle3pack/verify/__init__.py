"""Static checks of a draft against its target and its engines, and the smoke test."""
