"""One run at a time in a folder: a file that the system keeps locked for as long as the process lives."""

import os
import platform
from pathlib import Path
from typing import IO

from dae.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: there, files that are open can't be deleted anyway
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


class Lock:
    """Of a folder that is there. The file stays when the lock is gone: what it says, host and pid, counts only while it is locked."""

    def __init__(self, folder: Path):
        self._file: IO[str] = (folder / LOCK).open("a+")
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = " ".join(self._file.read(200).split()) or "another process"
            self._file.close()
            raise ConfigError(f"{folder}: a run is going on there ({holder}): choose another --name or --seed") from None
        except OSError:
            pass  # a file system without locks

    def sign(self) -> None:
        """Write down whose it is."""
        self._file.truncate(0)
        self._file.write(f"host {platform.node()}, pid {os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let others have the folder."""
        self._file.close()
