"""The order of reads and writes in memory that processes share (floor 3).

x86 shows a rank's writes to the others in their order; ARM need not: a count may be seen before the
row that it counts, and memory be read before the count that says it is there. Python has no fence.
A lock that is let go of and taken again makes one, by C11's rules for releases and acquires: what
comes before the release is over before it, what comes after the acquire begins after it, and the
two stay in order.
"""

from __future__ import annotations

from threading import Lock


def fence() -> None:
    """Let all that this thread has read and written be so for others, before what it does next."""
    mine = Lock()  # no other thread waits for it
    with mine:
        pass
    with mine:
        pass
