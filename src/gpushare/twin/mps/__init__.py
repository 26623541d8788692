"""A faithful twin of the MPS daemon for machines without a GPU: a real process behind a real socket."""
