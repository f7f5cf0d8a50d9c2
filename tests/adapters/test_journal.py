from pathlib import Path

from adapters.journal import Journal, JournalEntry
from adapters.record import AdapterRecord, promote, publish


def entry(number: int, record: AdapterRecord | None = None, withdraws: str = "") -> JournalEntry:
    return JournalEntry(
        entry_id=f"e{number}", created="t", record=record, actor="a", withdraws=withdraws
    )


def record(generations: int = 1, name: str = "json") -> AdapterRecord:
    result = None
    for number in range(generations):
        result = publish(
            result, name=name, base_id="tiny", digest=f"sha256:{number:064x}", created="t"
        )
    assert result is not None
    return result


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    assert journal.read() == []
    entries = [
        entry(1, record()),
        entry(2, promote(record(2), alias="prod", version_ref="v2")),
    ]
    for one in entries:
        journal.append(one)
    assert Journal(tmp_path / "j").read() == entries


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(entry(1, record()))
    journal.append(entry(2, record(2)))
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-20])

    assert [e.entry_id for e in journal.read()] == ["e1"]
    journal.append(entry(3, record(3)))
    assert [e.entry_id for e in journal.read()] == ["e1", "e3"]


def test_a_withdrawn_entry_never_happened(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(entry(1, record(1)))
    journal.append(entry(2, record(2)))
    journal.append(entry(3, withdraws="e2"))
    assert journal.latest_records() == {"json": record(1)}


def test_the_newest_generation_of_each_name_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for number, one in enumerate([record(2), record(1), record(1, "law")]):
        journal.append(entry(number, one))
    assert journal.latest_records() == {"json": record(2), "law": record(1, "law")}
