"""A choice of experts for each token, and the losses that keep the choice even."""
