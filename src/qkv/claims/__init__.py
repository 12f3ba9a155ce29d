"""What the literature claims, as experiments that run here: `qkv reproduce`.

To add one:

1. An entry in `registry.py`: name, number, the claim in a sentence of ours, the paper, the expectation
   word for word as it was written before anything was measured, and the experiment's module.
2. A module of that name in `experiments/` with these functions (see `claim.Experiment`):

       measure(run) -> figures       one seed: a dict of what JSON can hold
       judge(figures) -> checks      of all seeds; the verdict follows from the checks alone
       draw(figures) -> pictures     {"loss": picture(curves(...))}; may be left out

3. A test in `tests/claims/` that runs the smoke size (a few seconds) and that judges made-up figures
   both ways. The tests of the frame find the new claim by themselves and run its smoke size too.

What helps:

    run.of(1500, 20)                 the full number and the smoke one
    run.generator("weights")         random numbers by name; variants that ask for one name draw the same
    run.progress(done, total, note)  pass it to `train(..., told=run.progress)`
    models.small_lm, initialised     a small Transformer from a description, with first weights
    training.train, mean_loss, ...   the one loop, and what is measured of a network
    tasks.*, data.*                  made-up tasks; texts, images and sounds by name
    judging.below, within            checks of an order or a bound that must hold in every seed
    qkv.charts: curves, bars, heat, path  panels; `picture(*panels)` makes the SVG

Rules: three seeds and all that they train in ten minutes on two cores (a claim that has time for fewer says
so, `seeds`, and in a check); assert the order of results, not their values; set a bound before running and
leave it; every part of the expectation is a check, one that cannot be measured here is one that says so;
any verdict is a good one. Never tune an experiment towards what is expected; what was tried and changed
stands in the module's docstring. A training that diverges is None in the figures. A seed is measured again
when the code that `measure` reaches in this package changes (`fingerprint`), so judges and pictures can be
improved at no cost.
"""

from qkv.claims.claim import Check, Claim, Run, verdict
from qkv.claims.registry import CLAIMS
from qkv.claims.report import Outcome, Report
from qkv.claims.running import OUT, kept, reproduce

__all__ = ["CLAIMS", "OUT", "Check", "Claim", "Outcome", "Report", "Run", "kept", "reproduce", "verdict"]
