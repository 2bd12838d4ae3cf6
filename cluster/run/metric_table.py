"""What every metric of metrics.jsonl means: the table behind docs/metrics.md, kept true by a test against the code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One metric; `<...>` in its name stands for any word, `k` after `@` for a number."""

    name: str
    formula: str
    unit: str
    healthy: str
    """Where it is in a run that goes well."""
    otherwise: str
    """What it means when it leaves that range; findings of the doctor in backquotes."""


METRICS: Final[tuple[MetricDoc, ...]] = (
    MetricDoc(
        "round", "turns of the loop done; row 0 is the evaluation before any update", "count", "0, 1, 2, ... no gap",
        "A gap or a duplicate: the file was changed by hand.",
    ),
    MetricDoc(
        "weights_version", "completed rounds behind the weights that sampled the round", "count",
        "round - 1; with the async schedule down to round - 1 - max-lag",
        "Further behind: `stale`, the engines sample with old weights.",
    ),
    MetricDoc(
        "responses", "responses that are trained in the round", "count", "--rollouts (times inner updates)",
        "Fewer: groups were dropped, see dropped/<reason>.",
    ),
    MetricDoc(
        "tokens/generated", "sum of response lengths, end tokens included", "tokens", "follows response/length",
        "See `length-explosion` and `length-collapse`.",
    ),
    MetricDoc(
        "reward/total", "mean over responses of the weighted sum of reward parts", "reward", "rises, then levels off",
        "Falls for good: `reward-collapse`. 0 from the start: `reward-zero`. Flat and low: `plateau`. Rises alone: see "
        "its parts.",
    ),
    MetricDoc(
        "reward/correctness", "mean over responses of 1 if the answer is right, else 0", "share", "rises",
        "Falls or stalls while reward/format rises: `format-hacked`, or `lr-too-high` in the first rounds.",
    ),
    MetricDoc(
        "reward/format", "mean over responses of 1 if the form is right, else 0 (before its weight)", "share",
        "rises early to about 1", "0 for ever: it asks for something the responses cannot contain (`reward-zero`).",
    ),
    MetricDoc(
        "reward/<part>", "mean over responses of any further part, before its weight", "reward", "depends on the part",
        "0 for ever: the part teaches nothing (`reward-zero`).",
    ),
    MetricDoc(
        "reward/std", "mean over groups of the standard deviation of reward/total within the group", "reward",
        "above 0.1",
        "Towards 0: groups agree, there is little to learn (`no-signal`).",
    ),
    MetricDoc(
        "group/zero_signal", "share of groups whose advantages are all 0 (every response got the same reward)", "share",
        "0.1 to 0.6, rising as the task is solved; with one prompt per round 0 or 1, about two thirds of the time 1",
        "Above 0.8: `no-signal`. 1 with KL on: `kl-takeover`.",
    ),
    MetricDoc(
        "response/length", "mean tokens per response, end token included", "tokens", "changes slowly",
        "Multiplies without more accuracy: `length-explosion`. Shrinks to a third or less: `length-collapse`.",
    ),
    MetricDoc(
        "response/truncated", "share of responses cut off at --rollout.max-new-tokens", "share", "below 0.1",
        "About 1: `all-truncated`. Rising: `length-explosion`.",
    ),
    MetricDoc(
        "policy/loss", "policy term of the loss without KL, mean over the steps of the round", "loss",
        "no range: it is no measure of progress",
        "0 throughout: `loss-zero-by-construction`, harmless. Many times its start, for good: `grad-growth`.",
    ),
    MetricDoc(
        "policy/entropy", "mean over response tokens of -sum_v p(v) ln p(v)", "nats per token",
        "falls moderately, stays above a tenth of its start",
        "Rises by nats, towards ln V: `entropy-explosion`. Below a tenth, task not solved: `entropy-collapse`.",
    ),
    MetricDoc(
        "policy/ratio_mean", "mean of exp(logprobs - old_logprobs), per token or response (--learner.ratio-level)",
        "ratio", "0.95 to 1.05 per token; 1 to 2.5 for a product over a response",
        "Above 3, lasting: `ratio-explosion`.",
    ),
    MetricDoc(
        "policy/ratio_max", "largest such ratio of the round", "ratio", "below 10 per token",
        "Above 100, lasting: `ratio-explosion`.",
    ),
    MetricDoc(
        "policy/clip_fraction_low", "share of ratios whose gradient the lower bound cuts off", "share", "below 0.1",
        "With the upper share above a quarter: `clip-saturation`.",
    ),
    MetricDoc(
        "policy/clip_fraction_high", "share of ratios whose gradient the upper bound cuts off", "share", "below 0.1",
        "With the lower share above a quarter: `clip-saturation`.",
    ),
    MetricDoc(
        "policy/clip_fraction_dual", "share of ratios that the dual clip bounds (negative advantages)", "share",
        "below 0.01", "More: bad responses have become far more likely, see `ratio-explosion`.",
    ),
    MetricDoc(
        "policy/clamped", "log-ratios clamped to +-20 before exp, sum over the round", "count", "0",
        "Above 0: ratios beyond e^20, `ratio-explosion`.",
    ),
    MetricDoc(
        "policy/tokens", "tokens that the denominators of the round count", "tokens", "about tokens/generated",
        "Much lower: the overlong filter takes many responses out.",
    ),
    MetricDoc(
        "policy/effective_tokens", "tokens whose policy gradient is not 0", "tokens",
        "about policy/tokens times the share of groups with signal",
        "Towards 0: clipping or groups without spread leave nothing to learn from.",
    ),
    MetricDoc(
        "policy/kl", "KL estimate against the reference (--kl.kind), aggregated like the loss, before its coefficient",
        "nats", "below 0.5", "Many times its start and above 0.5: `kl-runaway`.",
    ),
    MetricDoc(
        "policy/kl_loss", "coefficient times policy/kl: the term that is added to the loss", "loss",
        "small beside the policy term", "Grows and is the only gradient left: `kl-takeover`. Grows: `kl-runaway`.",
    ),
    MetricDoc(
        "policy/kl_clamped", "differences of log-probs clamped to +-20 in the KL term", "count", "0",
        "Above 0: the policy is so far away that the term has no gradient there, see `kl-runaway`.",
    ),
    MetricDoc(
        "policy/grad_norm", "norm of the gradient before clipping, mean over the steps of the round", "norm",
        "within a factor of 3 of its start", "Single steps ten times higher: `grad-spike`. Five times higher, lasting: "
        "`grad-growth`.",
    ),
    MetricDoc("policy/lr", "learning rate of the last steps", "1/step", "as set", "Too high: `lr-too-high`."),
    MetricDoc(
        "policy/skipped_steps", "steps that were not applied because something was not finite", "count", "0",
        "Above 0: `grad-spike`; three in a row stop the run.",
    ),
    MetricDoc(
        "advantage/mean", "mean advantage over responses", "advantage", "0 (groups are centred)",
        "Not 0: the advantage kind does not centre, or groups are mixed up.",
    ),
    MetricDoc(
        "advantage/std", "standard deviation of advantages over responses", "advantage",
        "about the root of the share of groups with signal", "0: no signal at all (`no-signal`, `kl-takeover`).",
    ),
    MetricDoc(
        "correction/weight_mean", "mean importance weight old/sampler after cap or mask", "ratio", "0.95 to 1.05",
        "Away from 1: engine and learner disagree, see `mismatch-growing`.",
    ),
    MetricDoc(
        "correction/weight_max", "largest importance weight before cap or mask", "ratio", "below 5",
        "Above: see `mismatch-growing`.",
    ),
    MetricDoc(
        "correction/capped", "share of weights that reached --correction.cap", "share", "below 0.01",
        "More: see `mismatch-growing`.",
    ),
    MetricDoc(
        "correction/masked", "share of weights outside floor and cap, left out of the loss", "share", "below 0.05",
        "More: much of the round is not trained, see `mismatch-growing`.",
    ),
    MetricDoc(
        "correction/off_policy", "share of responses left out by --correction.off-policy-delta", "share", "below 0.05",
        "More: the policy moves too far within a round, lower --learner.lr.",
    ),
    MetricDoc(
        "correction/clamped", "log-weights clamped to +-20, sum over the round", "count", "0",
        "Above 0: engine and learner score different things.",
    ),
    MetricDoc(
        "mismatch/mean", "mean over response tokens of |sampler_logprobs - old_logprobs|, of the same weights", "nats",
        "below 1e-4 in float32, below 0.03 in bfloat16, not growing", "Grows: `mismatch-growing`.",
    ),
    MetricDoc(
        "mismatch/max", "largest such difference of a token", "nats", "below 0.02 in float32, below 1 in bfloat16",
        "Above the limit the run stops and names likely causes. Grows: `mismatch-growing`.",
    ),
    MetricDoc(
        "staleness/mean", "async: mean over responses of weights versions between sampling and training", "count",
        "at most --cluster.max-lag", "More: `stale`.",
    ),
    MetricDoc(
        "staleness/max", "async: largest such number", "count", "at most --cluster.max-lag", "More: `stale`.",
    ),
    MetricDoc(
        "staleness/drift_mean", "async: mean over tokens of |sampler_logprobs - old_logprobs|, of other weights",
        "nats", "below 0.1, not growing", "Grows: lower --cluster.max-lag or --learner.lr.",
    ),
    MetricDoc(
        "staleness/drift_max", "async: largest such difference of a token", "nats", "below 3",
        "Grows: lower --cluster.max-lag or --learner.lr.",
    ),
    MetricDoc(
        "sync/seconds", "time from gathered weights to the last good receipt", "s", "below 2 % of time/round",
        "Slow: another --cluster.transport, fewer engines per node.",
    ),
    MetricDoc(
        "sync/receipt_ok", "1 if every engine proved that it holds the new weights", "0 or 1", "1",
        "0: `stale`; the run stops by itself.",
    ),
    MetricDoc(
        "dropped/<reason>", "responses that were planned and not trained, by reason", "count",
        "0; with --filter.dynamic-sampling, no_signal is as high as the prompts are one-sided",
        "grader_error: a fault of the reward function. no_signal rising: prompts too easy or too hard.",
    ),
    MetricDoc(
        "grader/timeouts", "answers that ran into the grader's deadline or memory limit (each is wrong)", "count",
        "below 1 % of responses", "More: look at such answers; raise --reward.deadline if they are reasonable.",
    ),
    MetricDoc(
        "grader/errors", "responses in groups that were dropped because grading failed", "count", "0",
        "Above 1 % the run stops: the reward function or the checker is at fault.",
    ),
    MetricDoc(
        "fleet/restarts", "engines restarted since the start of the run", "count", "0",
        "Rising: see the engine's log in logs/; a restarted engine samples only after a good receipt.",
    ),
    MetricDoc(
        "eval/correctness", "share of right answers on held-out prompts, temperature 1", "share", "rises with training",
        "Falls while reward/total holds or rises: `eval-gap`.",
    ),
    MetricDoc(
        "eval/correctness_low", "lower end of the 95 % Wilson interval of eval/correctness", "share",
        "a few percent below eval/correctness", "Far below: raise --eval.size, differences are not real otherwise.",
    ),
    MetricDoc(
        "eval/correctness_high", "upper end of the same interval", "share", "a few percent above eval/correctness",
        "Far above: raise --eval.size.",
    ),
    MetricDoc(
        "eval/correctness/<domain>", "eval/correctness of one domain of a mixture", "share", "rises with training",
        "Falls while others rise: change --data.mix.",
    ),
    MetricDoc("eval/prompts", "held-out prompts evaluated", "count", "--eval.size", "Fewer: see eval/dropped."),
    MetricDoc("eval/samples", "responses per held-out prompt", "count", "--eval.samples", "As set."),
    MetricDoc(
        "eval/length", "mean tokens per response, held out", "tokens", "as response/length", "As response/length.",
    ),
    MetricDoc(
        "eval/truncated", "share of responses cut off, held out", "share", "below 0.1", "As response/truncated.",
    ),
    MetricDoc(
        "eval/dropped", "held-out prompts left out because grading failed", "count", "0",
        "Above 0: a fault of the reward function, see grader/errors.",
    ),
    MetricDoc("eval/format", "share of well-formed responses, held out", "share", "about 1", "As reward/format."),
    MetricDoc(
        "eval/pass@k", "mean over held-out prompts of 1 - C(n-c, k) / C(n, k), with c of n samples right", "share",
        "above eval/correctness", "Falls while eval/correctness rises: the policy sharpens and explores less.",
    ),
    MetricDoc(
        "eval/maj@k", "share of held-out prompts whose most frequent answer of k is right", "share",
        "above eval/correctness", "Below: wrong answers agree with each other, look at them in the report.",
    ),
    MetricDoc(
        "time/generate", "time in which engines generate (scoring hides behind it)", "s", "most of time/round",
        "Grows with response/length.",
    ),
    MetricDoc(
        "time/score", "time spent on scoring after the last response had come", "s", "about 0",
        "High: a slow reward function.",
    ),
    MetricDoc("time/learn", "time for the steps of the round", "s", "steady", "Grows with response/length."),
    MetricDoc(
        "time/old_logprobs", "time to score responses before the first step", "s", "a third of time/learn",
        "0 when they are not needed; --learner.old-logprobs sampler saves it.",
    ),
    MetricDoc("time/eval", "time of the evaluation", "s", "small beside time/round", "Raise --eval.every."),
    MetricDoc(
        "time/generate_tokens_per_s", "tokens/generated / time/generate", "tokens per second", "steady",
        "Falls as responses get longer; suddenly: an engine is slow or was replaced, see fleet/restarts.",
    ),
    MetricDoc(
        "time/learn_tokens_per_s", "policy/tokens / time/learn", "tokens per second", "steady",
        "Rises when many groups are left out for want of signal; falls: see time/old_logprobs and memory.",
    ),
    MetricDoc(
        "time/tokens_per_s", "tokens/generated / time/round", "tokens per second", "steady",
        "Compare with `launch.py bench`.",
    ),
    MetricDoc(
        "time/engines_idle", "mean over engines of the share of the time between two syncs in which none of its calls "
        "was at work", "share", "time/learn / time/round where engines and ranks take turns, else towards 0",
        "Higher: groups of unequal length keep some engines waiting for others, or --rollout.engines is too large.",
    ),
    MetricDoc(
        "time/ranks_idle", "the same over learner ranks (waiting for other ranks counts as work)", "share",
        "time/generate / time/round where engines and ranks take turns, else towards 0",
        "Higher: generation is the bottleneck, see --cluster.schedule and --rollout.engines.",
    ),
    MetricDoc(
        "time/generate_mfu", "FLOPs that the trained responses need (prompts once per group) / (time/generate x peak "
        "of the engines' devices); absent where the peak or the model's arithmetic is not known", "share",
        "0.01 to 0.2: decoding is bound by memory", "Lower: too few responses at once, raise --rollouts.",
    ),
    MetricDoc(
        "time/learn_mfu", "FLOPs of forward, backward, old log-probs and reference of what is trained / (time/learn x "
        "peak of the ranks' devices); absent where one of them is not known", "share", "0.2 to 0.5",
        "Lower: microbatches are too small, raise --learner.microbatch-tokens.",
    ),
    MetricDoc(
        "time/watch", "time spent on the live view, the doctor, trackers and the trace since the row before", "s",
        "below 1 % of time/round", "Higher: --quiet; report it.",
    ),
    MetricDoc("time/round", "time of the whole round", "s", "steady", "Compare with `launch.py bench`."),
    MetricDoc(
        "memory/<process>", "resident memory of a process at the end of the round", "bytes", "flat after a few rounds",
        "A steady slope is a leak: report it with the run directory.",
    ),
    MetricDoc(
        "steps", "list with one entry per step: its number, minibatch, whether it was skipped, and its metrics", "list",
        "one entry per minibatch", "A skipped entry: see policy/skipped_steps.",
    ),
)  # fmt: skip


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricDoc], ...]:
    """Exact names first, so that `reward/format` is not taken for `reward/<part>`."""
    ordered = sorted(METRICS, key=lambda doc: "<" in doc.name)
    return tuple((_pattern(doc.name), doc) for doc in ordered)


def _pattern(name: str) -> re.Pattern[str]:
    words = re.split(r"(<[a-z]+>|@k$)", name)
    fixed = {"@k": r"@(\d+|k)"}
    patterns = (r"[^/]+" if word.startswith("<") else fixed.get(word, re.escape(word)) for word in words)
    return re.compile("".join(patterns))


def metric_doc(name: str) -> MetricDoc | None:
    """What is known about a metric; None for a name that no row should have."""
    return next((doc for pattern, doc in _patterns() if pattern.fullmatch(name)), None)


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "`metrics.jsonl` has one row per round, `round` 0 being the evaluation before any update. Shares are",
        "fractions, not percent. A metric that does not apply is absent, not 0; metrics of the update leave out groups",
        "without signal where they are not computed for them. Names in the last column in backquotes are findings of",
        "`launch.py doctor`. This page is written by `python -m cluster.run.metric_table > docs/metrics.md`.",
        "",
        "| name | formula | unit | healthy | when it leaves that range |",
        "|---|---|---|---|---|",
    ]
    for doc in METRICS:
        cells = (f"`{doc.name}`", doc.formula, doc.unit, doc.healthy, doc.otherwise)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(metrics_page())
