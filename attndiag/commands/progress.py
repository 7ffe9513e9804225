"""How far the work is, on standard error: a bar in a terminal, a plain line now and then in a file or a pipe.

Both are the callback that the library takes: (what is being done, done, in all). No total (0) stands for work whose
length nobody knows; it has a bar that moves and, where it counts, a number.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attndiag.commands.console import remark

Progress = Callable[[str, int, int], None]

# seconds between two lines where there is no terminal
EVERY = 30.0


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """What to call with (what, done, in all); silent with `quiet`."""
    if quiet:
        yield lambda _what, _done, _total: None
    elif sys.stderr.isatty():
        with _bars() as tell:
            yield tell
    else:
        yield PlainLines(remark).tell


class PlainLines:
    """Progress as lines, no two within `every` seconds, with the time that is left where a total is known.

    Parameters
    ----------
    say : where a line goes.
    every : seconds.
    clock : of seconds; replaced in tests.
    """

    def __init__(
        self, say: Callable[[str], None], *, every: float = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every, self._clock = say, every, clock
        self._said = clock()
        # work -> when it was first told of, and how much was done then: what a resumed run found cost no time
        self._first: dict[str, tuple[float, int]] = {}

    def tell(self, what: str, done: int, total: int) -> None:
        """As the library calls it."""
        now = self._clock()
        began, at = self._first.setdefault(what, (now, done))
        if now - self._said < self._every:
            return
        self._said = now
        self._say(_line(what, done, total, now - began, done - at))


def _line(what: str, done: int, total: int, spent: float, made: int) -> str:
    if total == 0:
        count = f": {done}" if done else ""
        return f"{what}{count}, {_clock_time(spent)} so far"
    unit = " prompts" if what == "measuring" and total != 1 else " prompt" if what == "measuring" else ""
    left = f", about {_clock_time(spent / made * (total - done))} left" if made > 0 and done < total else ""
    return f"{what}: {done} of {total}{unit}, {_clock_time(spent)} so far{left}"


def _clock_time(seconds: float) -> str:
    """Hours, minutes and seconds, as in `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}", style="progress.download"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    bars, tasks, open_ended = Bars(*columns, console=Console(stderr=True)), {}, {}

    def close(but: str = "") -> None:
        # work of unknown length is done when the next begins; a bar that is full says so, one at 0/? does not
        for name in [name for name in open_ended if name != but]:
            whole = max(open_ended.pop(name), 1)
            bars.update(tasks[name], completed=whole, total=whole)

    def tell(what: str, done: int, total: int) -> None:
        # one line for each kind of work; the steps of drawing a page share theirs
        name = what if total == 0 or what == "measuring" else f"steps of {total}"
        close(but=name)
        count = f"{done}/{total}" if total else str(done) if done else ""
        if name not in tasks:
            # not before: work that says nothing should leave no empty line
            bars.start()
            tasks[name] = bars.add_task(what, total=total or None, count=count)
        if total == 0:
            open_ended[name] = done
        bars.update(tasks[name], completed=done, description=what, count=count)

    try:
        yield tell
        # not after an error: what it stopped is not done
        close()
    finally:
        if tasks:
            bars.stop()
