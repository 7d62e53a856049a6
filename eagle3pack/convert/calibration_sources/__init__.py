"""Where the texts of a calibration and the target's states come from: one module a source."""
