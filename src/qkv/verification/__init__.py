"""Whether the fast runtime computes, with a user's own model, what the reference does: in a table."""

from qkv.verification.report import Row, Verification
from qkv.verification.verifier import verify

__all__ = ["Row", "Verification", "verify"]
