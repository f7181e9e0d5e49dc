"""Pure decisions: no I/O, no clock, no log, no randomness."""
