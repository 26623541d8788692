"""What every process at the edge needs once."""
