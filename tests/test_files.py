"""Files: whole, in the place of files only, and one line when they can't be written."""

import contextlib
import errno

import pytest

from dae.errors import FileError, ResourceError
from dae.files import failure, whole_file, writing


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    """Catches: a torn file under the name that was asked for, and leftovers."""
    path = tmp_path / "new" / "file"
    for text in ("one", "two"):
        with whole_file(path) as partial:
            partial.write_text(text)
            assert not path.exists() or path.read_text() == "one"
        assert path.read_text() == text
    with contextlib.suppress(ZeroDivisionError), whole_file(path) as partial:
        partial.write_text("half")
        1 / 0  # noqa: B018
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, ResourceError), (errno.EFBIG, ResourceError), (errno.EACCES, FileError)]
)
def test_what_the_system_says_is_one_line_with_the_path(number, kind, tmp_path):
    with pytest.raises(kind, match=rf"^{tmp_path}: can't be written: [A-Z][a-z ]+$"), writing(tmp_path):
        raise OSError(
            number, {errno.ENOSPC: "No space left", errno.EFBIG: "File too large", errno.EACCES: "Permission denied"}[number]
        )
    assert str(failure("x", OSError("odd"))) == "x: can't be written: odd"
