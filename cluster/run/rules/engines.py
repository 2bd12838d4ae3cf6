"""Engines and learner: drifting apart, or too far behind."""

from __future__ import annotations

import numpy as np

from cluster.run.findings import Severity
from cluster.run.robust import find_shift
from cluster.run.rules import Sign, rule
from cluster.run.series import RunView, levels, onset, went


@rule(
    "mismatch-growing",
    needs=(("mismatch/mean", "mismatch/max"),),
    cause="Engine and learner disagree more and more about the same tokens: the engines hold older weights than "
    "believed, answer from a prefix cache of an older policy, score at another temperature, or lose precision as the "
    "policy sharpens. The ratio then corrects for something that is not the policy's change.",
    cure="(1) Check that sync/receipt_ok is true in every round and that fleet/restarts is 0 around this one. (2) Same "
    "dtype on both sides: --rollout.dtype and --learner.dtype. (3) --correction.kind tis_token to bound what is left. "
    "(4) --rollout.temperature 1 --rollout.top-p 1.",
)
def mismatch_growing(view: RunView) -> Sign | None:
    """The difference in log-probs lasts at several times its starting level."""
    for key, least, bad in (("mismatch/mean", 5e-3, 0.03), ("mismatch/max", 0.1, 2.0)):
        if key == "mismatch/max" and view.has("mismatch/mean"):
            break  # one odd token moves the largest difference; it is judged only where nothing better is logged
        mismatch = view.series(key)
        before, medians, width = levels(view, mismatch)
        limit = max(3 * before, least)
        high = np.flatnonzero(medians >= limit)
        # Halves are compared too: a slow, steady growth never shows against a start that it is part of.
        shift = find_shift(mismatch.values, (width, 3 * width), 0.0, relative=2, absolute=least, z=5, down=False)
        if not len(high) and shift is None:
            continue
        if len(high):
            since = onset(mismatch, int(high[0]), width, limit)
            after = float(medians.max())
        else:
            assert shift is not None
            since = int(mismatch.rounds[min(shift.start, len(mismatch) - 1)])
            before, after = shift.before, shift.after
        severity: Severity = "critical" if after >= max(5 * before, bad) else "warning"
        return Sign(severity, since, {key: f"{went(before, after)} nats"})
    return None


@rule(
    "stale",
    needs=(("weights_version", "sync/receipt_ok"),),
    cause="Responses come from weights older than the run allows: a sync did not happen or did not arrive, or an "
    "engine came back from a restart with old weights. Training goes on with plausible curves and wrong ratios.",
    cure="(1) Look for the last good receipt in events.jsonl and the engine's log in logs/. (2) launch.py resume RUN: "
    "it publishes the weights anew. (3) --cluster.transport object_store if another transport is in use. (4) With the "
    "async schedule, lower --cluster.max-lag or give generation more engines.",
)
def stale(view: RunView) -> Sign | None:
    """A failed receipt, or weights further behind the round than allowed."""
    failed = np.flatnonzero(view.column("sync/receipt_ok") == 0)
    if len(failed):
        seen = f"false in {len(failed)} rounds"
        return Sign("critical", int(view.rounds[failed[0]]), {"sync/receipt_ok": seen})
    versions = view.series("weights_version")
    if not len(versions):
        return None
    trained = versions.rounds >= 1
    rounds, lag = versions.rounds[trained], (versions.rounds - versions.values)[trained]
    if not len(lag):
        return None
    # Rows name the version that sampled (one less than the round when nothing is late) or the one just published.
    behind = lag - min(1.0, max(0.0, float(lag[:3].min())))
    late = np.flatnonzero(behind > view.limits.max_lag)
    if not len(late):
        return None
    at = int(late[0])
    seen = (
        f"{rounds[at] - lag[at]:.0f} in round {rounds[at]}, up to {behind.max():.0f} versions behind where "
        f"{view.limits.max_lag} is allowed"
    )
    return Sign("critical", int(rounds[at]), {"weights_version": seen})
