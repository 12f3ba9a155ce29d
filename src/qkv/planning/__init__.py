"""What a model needs, before anything is bought or loaded: memory, time, what fits."""

from qkv.planning.page import page
from qkv.planning.plan import plan
from qkv.planning.profile import DEVICES, Profile, here
from qkv.planning.result import Plan
from qkv.planning.sizes import Part, shown, tokens

__all__ = ["DEVICES", "Part", "Plan", "Profile", "here", "page", "plan", "shown", "tokens"]
