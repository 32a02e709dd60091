"""Many devices: what a run would cost on them (`opd cluster plan`)."""
