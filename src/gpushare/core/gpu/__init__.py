"""A GPU as the rest of core sees it: its pipes, its health, and the Protocol of its devices."""
