"""Mixers with a state of fixed size in place of a cache that grows."""
