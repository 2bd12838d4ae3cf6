"""The grading processes: they read one item after the other from a pipe and answer each with one line of JSON.

Started by path, not imported: `python -P scorer_worker.py serve ROOT` for a user's function, `... nursery ROOT` for
math-verify, which is imported once and then forked. As little as possible is imported. Items come from the parent
(pickles); what goes back is JSON only, because here the model's answers are at work.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

ITEMS_PER_PROCESS = 500
"""math-verify's caches grow; a process ends after so many items."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_NEAR_THE_LIMIT = 0.75
_ACTS = """
os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.remove os.rename os.rmdir os.mkdir os.chmod os.link
os.symlink os.truncate os.putenv subprocess.Popen pty.spawn ctypes.dlopen
"""
_REFUSED = frozenset(_ACTS.split())

Item = dict[str, Any]
Handle = Callable[[Item], Item]


def main() -> int:
    """Serve until the parent closes the pipe."""
    sys.path.insert(0, sys.argv[2])
    return _nursery() if sys.argv[1] == "nursery" else _serve_user()


def _serve(items: BinaryIO, replies: BinaryIO, handle: Handle, hello: Item, count: int | None = None) -> None:
    _write(replies, {"hello": hello | {"pid": os.getpid()}})
    while count is None or count > 0:
        item = _read(items)
        if item is None:
            return
        _write(replies, _answer(handle, item))
        count = None if count is None else count - 1


def _answer(handle: Handle, item: Item) -> Item:
    try:
        return handle(item)
    except MemoryError:
        return {"memory": True}
    except ValueError as problem:
        from rollout.types import UserError

        return {"contract": str(problem)} if isinstance(problem, UserError) else {"broken": traceback.format_exc()}
    except BaseException:  # noqa: BLE001  a process boundary: SystemExit of a user's function is an error, not an end
        return {"broken": traceback.format_exc()}


# A user's function. Its code is trusted: only memory is limited.


def _serve_user() -> int:
    items, replies = _private_pipes()
    setup = _read(items)
    if setup is None or not _tied_to(setup["parent"]):
        return 1
    from rollout.types import UserError

    try:
        _limit(resource.RLIMIT_DATA, setup["memory"] * 2**20)
        _limit(resource.RLIMIT_CORE, 0)
        from rollout.rewards.loading import load

        function = load(setup["spec"])
    except UserError as problem:
        _write(replies, {"contract": str(problem)})
        return 1
    except BaseException:  # noqa: BLE001  a process boundary: the parent must learn why
        _write(replies, {"broken": traceback.format_exc()})
        return 1

    def handle(item: Item) -> Item:
        return {"parts": function.score(item["group"], setup["seconds"])}

    _serve(items, replies, handle, {"style": function.style, "is_async": function.is_async})
    return 0


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Our two pipes under other numbers, so that a print or an input() of user code cannot disturb them."""
    items = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return items, replies


# math-verify.


def _nursery() -> int:
    """Import math-verify, then fork a grading process for every pair of pipes that arrives."""
    parent = socket.socket(fileno=os.dup(0))
    setup = pickle.loads(parent.recv(1 << 16))
    if not _tied_to(setup["parent"]):
        return 1
    fault = _prepare_math()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the children
    gc.collect()
    gc.freeze()
    nursery = os.getpid()
    while True:
        data, pipes, _, _ = socket.recv_fds(parent, 1, 2)
        if not data:
            return 0
        if os.fork() == 0:
            parent.close()
            items, replies = os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb")
            if fault:
                _write(replies, {"broken": fault})
            elif _tied_to(nursery):
                _serve(items, replies, _confined_math(setup), {"style": "math"}, ITEMS_PER_PROCESS)
            os._exit(0)
        for pipe in pipes:
            os.close(pipe)


def _prepare_math() -> str:
    """Load all that answers need; the text of what is wrong, if anything is."""
    try:
        from rollout.rewards.answers.symbolic import ask

        known = (("\\gcd(4,6)", "2"), ("\\sum_{k=1}^{3} k", "6"), ("\\int_0^1 x dx", "\\frac{1}{2}"))
        wrong = [gold for gold, answer in known if ask(answer, gold) != "right"]
        if wrong:
            return f"math-verify does not know the value of {', '.join(wrong)}: nothing it says can be trusted"
        sys.modules["math_verify.parser"].parse_expr = _refuse_text  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  a process boundary: the parent must learn why
        return traceback.format_exc()
    return ""


def _confined_math(setup: Item) -> Handle:
    """math-verify behind limits: memory, CPU, descriptors, no files written, no programs, no connections."""
    from rollout.rewards.answers.symbolic import ask

    memory = setup["memory"] * 2**20
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 0)
    sys.addaudithook(_refuse_acts)

    def handle(item: Item) -> Item:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # The deadline is CPU time, kept by the kernel also inside one long operation in C: a verdict must not depend
        # on how busy the machine is. The parent's clock is the second line, for what waits instead of computing.
        cpu = math.ceil(usage.ru_utime + usage.ru_stime + setup["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        verdict = ask(item["answer"], item["gold"])
        # math-verify takes a MemoryError for a plain "not equal"; the peak tells the two apart.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"memory": True} if verdict == "wrong" and peak > _NEAR_THE_LIMIT * memory else {"verdict": verdict}

    return handle


def _refuse_acts(event: str, _: tuple[Any, ...]) -> None:
    """Nothing that grades an answer starts a program, opens a connection or changes a file."""
    if event in _REFUSED or event.startswith(("socket.", "shutil.", "ftplib.", "http.", "urllib.")):
        raise PermissionError(f"{event} is refused in a grading process")


def _refuse_text(*_: Any, **__: Any) -> Any:
    raise ValueError("text is not evaluated here")


# Both.


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, value))


def _read(stream: BinaryIO) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        return None
    return pickle.loads(stream.read(struct.unpack("<I", head)[0]))


def _write(stream: BinaryIO, reply: Item) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()


def _tied_to(parent: int) -> bool:
    """Die with the parent, also where it is killed; False when it is gone already."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main())
