"""The parts of README.md that runs write themselves."""

from pathlib import Path

README = Path(__file__).resolve().parent / "README.md"


def replace_section(name: str, body: str, *, readme: Path = README) -> None:
    """Put `body` between the two marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = readme.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{readme} has no marks {begin} … {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n{body}\n{end}{after}")
