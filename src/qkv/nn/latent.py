"""Attention over a small latent: what the cache keeps is not keys and values but what makes them."""
