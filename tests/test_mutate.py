"""The list of known mistakes fits the code. (`make mutate` makes each of them and runs the tests, which takes long.)"""

from mutate import ROOT, TESTS, all_mistakes, read_table, row


def test_every_mistake_can_be_made():
    """Catches: code that moved on under a mistake, which then is made no more."""
    texts = {m.path: (ROOT / m.path).read_text() for m in all_mistakes()}
    assert {m.what: texts[m.path].count(m.old) for m in all_mistakes() if texts[m.path].count(m.old) != 1} == {}
    assert all(m.old != m.new for m in all_mistakes())
    assert {m.module for m in all_mistakes()} <= set(TESTS)


def test_every_mistake_was_made_and_noticed():
    """Catches: a mistake that was added and never tried, and one that no test notices."""
    known = read_table()
    assert set(known) == {row(m) for m in all_mistakes()}
    assert [by for by in known.values() if not by.startswith("test_")] == []
