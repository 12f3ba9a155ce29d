from qkv.charts.scales import *  # noqa: F403
