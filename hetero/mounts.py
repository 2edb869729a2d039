"""File systems of directories, from the kernel's list of mounts (floor 0, no torch)."""

from __future__ import annotations

import os
import re
import stat
import warnings
from pathlib import Path
from typing import NamedTuple

from hetero.errors import ConfigError

RAM_FILE_SYSTEMS = ("tmpfs", "ramfs")
FAR_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "overlay", "fuse")


class Mount(NamedTuple):
    """The file system of a directory."""

    kind: str
    """Its type, as "ext4"; "" if unknown."""

    @property
    def is_ram(self) -> bool:
        return self.kind in RAM_FILE_SYSTEMS

    @property
    def is_far(self) -> bool:
        """Whether it lies on a network, or on another file system."""
        return self.kind.split(".")[0] in FAR_FILE_SYSTEMS


def mount_of(path: str | Path, root: Path = Path("/")) -> Mount:
    """Return a directory's file system, by the device number in the kernel's list of mounts."""
    try:
        device = os.stat(path).st_dev
        rows = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return Mount("")
    number = f"{os.major(device)}:{os.minor(device)}"
    for row in rows:  # id parent major:minor root mount-point options ... - type source options
        fields, _, rest = row.partition(" - ")
        if fields.split()[2:3] == [number]:
            return Mount(rest.split()[0])
    return Mount("")


def is_mount_point(path: str, root: Path = Path("/")) -> bool:
    """Whether another file system, or another part of one, begins at a directory."""
    try:
        rows = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        rows = []
    return os.path.ismount(path) or any(unescaped(row.split()[4]) == path for row in rows)


def unescaped(text: str) -> str:
    """Return a path of the kernel's tables, where blanks and the like are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def check_spill(where: str) -> None:
    """Refuse a directory that is unfit for spilling; warn of a slow one."""
    mount, mode = mount_of(where), os.stat(where).st_mode
    if mount.is_ram:
        raise ConfigError(
            f"nvme={where!r} lies on {mount.kind}, which is RAM",
            advice="name a directory on a drive, or raise host=",
        )
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"nvme={where!r} may be written by everybody (mode {stat.S_IMODE(mode):o})",
            advice=f"chmod o-w {where}, or name a directory of your own",
        )
    if mount.is_far:
        warnings.warn(
            f"nvme={where!r} lies on {mount.kind}, which is slow for this and may lose writes",
            stacklevel=3,
        )
