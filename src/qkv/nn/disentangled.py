"""DeBERTa's scores of contents against distances. He et al. 2020."""
