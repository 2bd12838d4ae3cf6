"""The journal: every scored group is on disk before it may be trained, and counts exactly once.

While a round runs, its groups are appended to `groups/round-00003.journal`; each is with the operating system when
`append` returns, and on the disk itself after `sync`. When the round is done, `compact` turns the journal into
`groups/round-00003.parquet`, with what training made of the groups. A crash in between loses nothing that was
appended: `load` gives the groups back, and only the missing ones are generated again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cluster.errors import BrokenPromise
from cluster.run.group_codec import decode_group, encode_group
from cluster.run.records import RecordFile, sync_folder
from cluster.run.round_table import Key, as_table, in_portions, part_names, read_round, write_round
from rollout.types import DoubleArray, ScoredGroup, UserError

__all__ = ["Journal", "read_round", "round_files", "round_name"]

_SYNC_EVERY = 64


def round_name(round_: int, kind: str = "round") -> str:
    """File name of a round (or, with `kind="eval"`, of the evaluation after it), without suffix."""
    return f"{kind}-{round_:05d}"


def round_files(run_folder: Path, kind: str = "round") -> dict[int, Path]:
    """Number -> file of the rounds (or, with `kind="eval"`, the evaluations) of a run, committed ones first choice."""
    found: dict[int, Path] = {}
    for suffix in ("journal", "parquet"):
        for path in (run_folder / "groups").glob(f"{kind}-*.{suffix}"):
            number = path.stem.removeprefix(f"{kind}-")
            if number.isdecimal():
                found[int(number)] = path
    return dict(sorted(found.items()))


class _Round:
    """One open round: its file, and where each group stands in it."""

    def __init__(self, path: Path) -> None:
        self.file = RecordFile(path)
        self.places: dict[Key, tuple[int, int, int]] = {}
        """Key -> (minibatch, offset, length)."""
        self.parts: dict[str, None] = {}
        for start, payload in self.file.found:
            self.register(decode_group(payload, columns=False), start, len(payload))
        self.file.found.clear()

    def register(self, scored: ScoredGroup, start: int, length: int) -> None:
        request = scored.group.request
        if request.key in self.places:
            raise BrokenPromise(f"{self.file.path} holds group {request.key} twice; it would be trained twice.")
        self.places[request.key] = (request.minibatch, start, length)
        self.parts.update(dict.fromkeys(scored.parts))

    def groups(self, columns: bool = True) -> Iterator[ScoredGroup]:
        """All groups by minibatch and key: the order does not depend on which engine was faster."""
        for _, (_, start, length) in sorted(self.places.items(), key=lambda item: (item[1][0], item[0])):
            yield decode_group(self.file.read(start, length), columns=columns)


class Journal:
    """The groups of a run, by round; several rounds may be open at once (the next is generated, this one trained)."""

    def __init__(self, run_folder: Path) -> None:
        """Use `groups/` of the run directory."""
        self.folder = run_folder / "groups"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.torn: dict[int, int] = {}
        """Round -> bytes that a crash had left behind its last whole group; they were cut off."""
        self._open: dict[int, _Round] = {}

    def append(self, scored: ScoredGroup) -> None:
        """Keep a group; when this returns, it outlives the process (after `sync`, the machine)."""
        if "total" in scored.parts:
            raise UserError("A reward part cannot be called `total`: that is the sum of the parts. Rename it.")
        request = scored.group.request
        if request.round < 0:
            raise BrokenPromise("Groups of an evaluation are not trained: `keep_evaluation` keeps them.")
        round_ = self._round(request.round)
        if request.key in round_.places:
            raise BrokenPromise(
                f"Group {request.key} of round {request.round} was scored a second time (attempt "
                f"{scored.group.attempt}); the first counts, this one must be discarded before it comes here."
            )
        payload = encode_group(scored)
        round_.register(scored, round_.file.append(payload), len(payload))
        if round_.file.unsynced >= _SYNC_EVERY:
            round_.file.sync()

    def sync(self, round_: int) -> None:
        """Bring the groups of a round onto the disk: call it before they are trained."""
        if round_ in self._open:
            self._open[round_].file.sync()

    def load(self, round_: int) -> list[ScoredGroup]:
        """All whole groups of a round that is not committed; a torn tail is cut off and noted in `torn`."""
        if round_ not in self._open and not self._path(round_).exists():
            return []
        return list(self._round(round_).groups())

    def compact(
        self,
        round_: int,
        advantages: Mapping[Key, DoubleArray],
        *,
        minibatches: Mapping[Key, int] | None = None,
        dropped: Mapping[Key, str] | None = None,
        keep_journal: bool = False,
    ) -> Path:
        """Turn the journal of a round into its Parquet file and remove it; returns the Parquet file.

        `advantages` has (G,) numbers for every group that was trained, `dropped` the reason for every other one: the
        journal must hold exactly these. `minibatches` is needed where groups were moved after they were planned. With
        `keep_journal` the journal stays until `retire`: for rounds that no checkpoint covers yet.
        """
        target = self.folder / f"{round_name(round_)}.parquet"
        if round_ not in self._open and not self._path(round_).exists():
            if target.exists():
                return target
            raise BrokenPromise(f"Round {round_} has no journal in {self.folder}: none of its groups was kept.")
        source, dropped = self._round(round_), dropped or {}
        _check_accounts(round_, source.places.keys(), advantages, dropped)
        parts = list(source.parts)
        tables = (
            as_table(portion, parts, advantages, minibatches or {}, dropped)
            for portion in in_portions(source.groups(columns=False))
        )
        write_round(target, tables)
        if not keep_journal:
            self._remove(round_)
        return target

    def keep_evaluation(self, round_: int, groups: Sequence[ScoredGroup]) -> Path:
        """Write the held-out groups that were evaluated after a round; the report follows their prompts over time."""
        dropped = {scored.group.request.key: "held out" for scored in groups}
        parts = part_names(groups)
        target = self.folder / f"{round_name(round_, 'eval')}.parquet"
        write_round(target, (as_table(portion, parts, {}, {}, dropped) for portion in in_portions(groups)))
        return target

    def retire(self, through_round: int) -> None:
        """Remove journals that are compacted, up to a round that a checkpoint covers."""
        for path in self.folder.glob("round-*.journal"):
            number = int(path.stem.removeprefix("round-"))
            if number <= through_round and path.with_suffix(".parquet").exists():
                self._remove(number)

    def set_aside(self, after_round: int, keep: Collection[int]) -> Path | None:
        """Move the files of all later rounds to `groups/discarded.<time>/`: a resume does these rounds again.

        The journals of the rounds in `keep` stay: their groups come from weights that the resume has.
        """
        staying = {self._path(number) for number in keep}
        leaving = [
            path
            for path in sorted(self.folder.glob("*-*.*"))
            if path.is_file() and _number(path) > after_round and path not in staying
        ]
        if not leaving:
            return None
        target = self.folder / f"discarded.{time.strftime('%Y%m%dT%H%M%S')}.{time.monotonic_ns() % 10**6:06d}"
        target.mkdir()
        for path in leaving:
            path.rename(target / path.name)
        for number in [number for number in self._open if number > after_round and number not in keep]:
            self._open.pop(number).file.close()
        sync_folder(self.folder)
        return target

    def close(self) -> None:
        """Sync and close all files."""
        for round_ in self._open.values():
            round_.file.close()
        self._open.clear()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, round_: int) -> Path:
        return self.folder / f"{round_name(round_)}.journal"

    def _round(self, round_: int) -> _Round:
        if round_ not in self._open:
            opened = _Round(self._path(round_))
            self._open[round_] = opened
            if opened.file.torn_bytes:
                self.torn[round_] = opened.file.torn_bytes
        return self._open[round_]

    def _remove(self, round_: int) -> None:
        if (opened := self._open.pop(round_, None)) is not None:
            opened.file.close()
        self._path(round_).unlink(missing_ok=True)
        sync_folder(self.folder)


def _number(path: Path) -> int:
    """Round of a file of groups; -1 for a file of another name."""
    kind, _, rest = path.name.partition("-")
    number = rest.partition(".")[0]
    return int(number) if kind in ("round", "eval") and number.isdecimal() else -1


def _check_accounts(
    round_: int, kept: Iterable[Key], advantages: Mapping[Key, DoubleArray], dropped: Mapping[Key, str]
) -> None:
    """Every group was trained once or dropped for a reason, and nothing else was."""
    both = sorted(advantages.keys() & dropped.keys())
    unknown = sorted((advantages.keys() | dropped.keys()) - set(kept))
    lost = sorted(set(kept) - advantages.keys() - dropped.keys())
    for keys, what in (
        (both, "were both trained and dropped"),
        (unknown, "were trained or dropped but never journalled"),
        (lost, "were journalled but neither trained nor dropped for a reason"),
    ):
        if keys:
            named = ", ".join(f"{row_id}/{occurrence}" for row_id, occurrence in keys[:5])
            raise BrokenPromise(f"Round {round_}: {len(keys)} groups {what}: {named}{' ...' if keys[5:] else ''}.")
