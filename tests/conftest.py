"""Settings for every test."""

from hypothesis import settings

# Timings on a shared machine say nothing about the code; benchmarks/ measures.
settings.register_profile("eagle3pack", deadline=None)
settings.load_profile("eagle3pack")
