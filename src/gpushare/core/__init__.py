"""Pure decisions: shares, placement, interference, attribution. No I/O, no clock, no unseeded randomness."""
