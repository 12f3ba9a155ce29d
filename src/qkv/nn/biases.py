"""Positions that bias the score: fixed slopes, learned buckets, vectors and sinusoids of the distance."""
