"""Errors that a user can act on: one line each, and the exit code that the command line ends with."""

import contextlib
import difflib
import math
import re
import signal
from collections.abc import Iterable, Iterator


class DaeError(Exception):
    """Something outside the program is wrong. The message is one line and says what to do."""

    exit_code = 1


class Diverged(DaeError):
    """Learning has come to numbers that are not finite; nothing good will come of it any more."""


class ConfigError(DaeError):
    """An option, a preset or a configuration file is wrong."""

    exit_code = 2


class EnvironmentFault(DaeError):
    """The environment can't be used, or broke its contract during the run."""

    exit_code = 3


class ResourceError(DaeError):
    """Not enough memory, disk or the like; found before anything was started where possible."""

    exit_code = 4


class FileError(DaeError):
    """A file is missing, damaged or not one of ours."""

    exit_code = 5


class MissingExtra(DaeError):
    """An optional package is needed and not installed."""

    exit_code = 6

    def __init__(self, feature: str, extra: str):
        super().__init__(f"{feature} needs an extra: pip install 'dae-rl[{extra}]'")


class Stopped(KeyboardInterrupt):
    """A signal ended a run, between two steps; the exit code is the shell's for that signal."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.exit_code = 128 + number


@contextlib.contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """One line where there is not. PyTorch has an exception of its own for CUDA only; elsewhere its words must tell."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split("\n")[0].split())
        if not (isinstance(error, MemoryError) or re.search("allocate|out of memory|[Oo]verflow", text)):
            raise
        raise ResourceError(f"{what}: not enough memory ({text[:200]})") from error


class DaeWarning(UserWarning):
    """Something that a user should know though nothing failed. The command line prints it as one line."""


def within(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuses an option outside its limits, NaN too."""
    if not least <= value <= most:
        raise ConfigError(
            f"{name}={value}: must be " + (f"at least {least}" if most == math.inf else f"between {least} and {most}")
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
