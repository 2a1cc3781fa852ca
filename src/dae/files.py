"""Files that are written appear whole or not at all, and what can't be written is said in one line."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from dae.errors import DaeError, FileError, ResourceError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Of the system's errors, those that say that something has run out."""


def failure(path: Path | str, error: OSError) -> DaeError:
    """The one line for what the system said of `path`."""
    kind = ResourceError if error.errno in _FULL else FileError
    return kind(f"{path}: can't be written: {error.strerror or error}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """That line in place of a traceback. Safetensors has an exception of its own, which knows no errno."""
    try:
        yield
    except OSError as error:
        raise failure(path, error) from error
    except SafetensorError as error:
        raise ResourceError(f"{path}: can't be written: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: it takes the place of `path` once all of it is there, and is removed if it fails."""
    with writing(path):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):  # a rename would replace a device or a link itself
            raise FileError(f"{path} is no regular file: it is not replaced; name another one")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
