"""Where a pod goes: what fits, whom it hurts, what ranks, which GPU, which cap."""
