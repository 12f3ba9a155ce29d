"""One module a claim: `measure`, `judge` and mostly `draw`. How to add one: see `qkv.claims`."""
