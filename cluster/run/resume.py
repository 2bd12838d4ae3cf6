"""`launch.py resume RUN`: what may differ, which checkpoint it is, and back to exactly where the run was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import BrokenPromise, PlanError
from cluster.plan import Plan
from cluster.run import cli
from cluster.run.checkpoints import Checkpoint, CheckpointStore
from cluster.run.commits import CHANGES_NO_RESULT, result_settings
from cluster.run.config import Config
from cluster.run.findings import Finding
from cluster.run.manifest import Manifest, setting_differences
from cluster.run.metrics import METRICS, read_events, read_metrics
from cluster.run.saved_config import CONFIG

if TYPE_CHECKING:
    from cluster.run.inputs import Inputs
    from cluster.run.journal import Journal
    from cluster.run.stages import Run
    from rollout.types import ScoredGroup


def requested(words: Sequence[str]) -> tuple[Config, Path]:
    """(configuration, run directory) of `resume RUN [settings]`. PlanError for a setting that may not differ."""
    if any(word in ("-h", "--help") for word in words):
        cli.parse(["--help"], "launch.py resume RUN")
    if "--help" in words[:1]:
        cli.parse(words, "launch.py resume RUN")
    if not words or words[0].startswith("-"):
        raise PlanError("resume needs a run directory: launch.py resume RUN [--rounds N]")
    folder, flags = Path(words[0]), list(words[1:])
    file = folder / CONFIG
    if not file.is_file():
        raise PlanError(f"{folder} holds no run: there is no {CONFIG} in it.")
    if any(flag.split("=")[0] in ("--run", "--config") for flag in flags):
        raise PlanError(
            "resume goes on in the directory of the run, with its own configuration: no --run, no --config."
        )
    saved = cli.parse(["--config", str(file)])
    asked = cli.parse(["--config", str(file), *flags], "launch.py resume RUN")
    before = dict(cli.fields(saved))
    changed = [
        f"{cli.flag_name(name)} {before[name]} -> {value}"
        for name, value in cli.fields(asked)
        if value != before[name] and name not in CHANGES_NO_RESULT
    ]
    if changed:
        raise PlanError(
            f"resume {folder}: these settings change results, so the run would not be the same run:\n    "
            + "\n    ".join(changed)
            + f"\n  Leave them out; or take the trained model into a new run: launch.py export {folder} DIR, then "
            f"launch.py --model DIR {' '.join(flags)}"
        )
    return asked, folder


def choose(store: CheckpointStore, config: Config, plan: Plan, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to go on from; None when the run was stopped before its first. PlanError when it does not fit."""
    checkpoint = store.find_latest(say)
    if checkpoint is None:
        run = store.path.parent
        if (run / METRICS).exists() and read_metrics(run):
            raise PlanError(f"{run} has rounds but no checkpoints: they were removed, so it cannot be resumed.")
        say("the run was stopped before its start was committed: it starts at its beginning")
        return None
    manifest = checkpoint.manifest
    if manifest.world_size != plan.ranks:
        raise PlanError(
            f"{checkpoint.path} was written by {manifest.world_size} learner rank(s), this machine would use "
            f"{plan.ranks}.\n  Add --learner.ranks {manifest.world_size}; or go on with the trained model in a new "
            f"run: launch.py export {store.path.parent} DIR, then launch.py --model DIR"
        )
    # Through JSON and back, as the saved ones went.
    differences = setting_differences(manifest.settings, Manifest.settings_from(result_settings(config, plan)))
    if differences:
        raise PlanError(
            f"{checkpoint.path} was made with other settings than {CONFIG} and this machine give now:\n"
            + "\n".join(f"    {name}: {saved!r}, now {now!r}" for name, saved, now in differences)
        )
    if config.rounds < manifest.round:
        raise PlanError(f"--rounds {config.rounds}: the run has already committed {manifest.round} rounds.")
    return checkpoint


def check_inputs(manifest: Manifest, inputs: Inputs, model: str) -> None:
    """PlanError when the rows or the model's tokenizer are not those the run was started with."""
    if manifest.data != inputs.data:
        raise PlanError(
            "The prompts are not those the run was started with (rows were added, removed or changed): it would skip "
            "or repeat rows unnoticed.\n  Give the same ones with --prompts, or start a new run from an exported model."
        )
    if manifest.model != model:
        raise PlanError(
            f"--model {inputs.model}: configuration or tokenizer are not those the run was started with.\n"
            f"  Give the same model, or start a new run with the exported one."
        )


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Put everything back to the committed round: weights, optimizer, randomness, prompts, metrics, journal."""
    from cluster.run.learning import restore_ranks

    manifest, recording = checkpoint.manifest, run.recording
    restore_ranks(run.system.learners, checkpoint)
    run.learning.resumed(manifest.round)
    run.generation.prompts.restore(manifest.prompts)
    moved = [recording.commits.store.adopt(checkpoint), recording.metrics.truncate_to(manifest.metrics_offset)]
    recording.journal.retire(manifest.round)
    run.generation.salvaged = salvage(recording.journal, manifest.round, run.plan.max_lag)
    moved.append(recording.journal.set_aside(manifest.round, keep=run.generation.salvaged.keys()))
    recording.rows = read_metrics(run.folder.path)
    if run.weights_version != manifest.round:
        raise BrokenPromise(
            f"{METRICS} ends with round {recording.metrics.last_round} at the offset of round {manifest.round}"
        )
    said = [event for event in read_events(run.folder.path) if event.get("kind") == "finding"]
    recording.findings = [Finding(**event["finding"]) for event in said if (event["round"] or 0) <= manifest.round]
    _tell(run, manifest, [path for path in moved if path is not None])


def salvage(journal: Journal, committed: int, max_lag: int) -> dict[int, dict[tuple[str, int], ScoredGroup]]:
    """Round -> groups of it that an interrupted run left behind and that count as if nothing had happened.

    They keep the version they were sampled with. A round with groups of later weights than those that were committed is
    left out: those weights are made again, and so are its groups. BrokenPromise when groups of the next round are not
    of a version that it may be trained with.
    """
    found = {}
    for round_ in range(committed + 1, committed + 2 + max_lag):
        groups = journal.load(round_)
        versions = {scored.group.weights_version for scored in groups}
        if round_ == committed + 1 and any(not 0 <= committed - version <= max_lag for version in versions):
            raise BrokenPromise(
                f"the journal of round {round_} holds groups of weights versions {sorted(versions)}, but this round is "
                f"trained on version {committed}"
                + (f" and at most {max_lag} behind" if max_lag else "")
                + f".\n  Remove round-{round_:05d}.journal from {journal.folder} and resume again."
            )
        if all(version <= committed for version in versions):
            found[round_] = {scored.group.request.key: scored for scored in groups}
    return found


def _tell(run: Run, manifest: Manifest, moved: list[Path]) -> None:
    """What a person and the event log should know about this resume."""
    recording, there = run.recording, {number: len(groups) for number, groups in run.generation.salvaged.items()}
    kept = sum(there.values())
    run.console.line(
        f"resumed    after round {manifest.round}, {manifest.steps} optimizer steps"
        + "".join(f"; {count} groups of round {number} are already there" for number, count in there.items() if count)
    )
    for path in moved:
        run.console.line(f"note       what came after it is done again; the first attempt was moved to {path}")
    now = recording.commits.base.versions
    other = [f"{name} {before} -> {after}" for name, before, after in setting_differences(manifest.versions, now)]
    if manifest.code != recording.commits.base.code:
        other.append("the code of rollearn")
    if other:
        run.console.always(f"warning: not the same as when the run was started: {', '.join(other)}; results may differ")
    recording.events.append(
        "resume", round=manifest.round, salvaged_groups=kept, moved=[str(path) for path in moved], differs=other
    )
