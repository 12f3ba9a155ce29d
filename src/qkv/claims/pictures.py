from qkv.charts.pictures import *  # noqa: F403
