"""Tables of measured pairs of training jobs, and predictors fitted to them."""
