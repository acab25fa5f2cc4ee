"""`tresnet bench report`: tables and pictures from the records."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tresnet.cli.output import progress, say

if TYPE_CHECKING:
    from tresnet.measure.report import Section

BEGIN = "<!-- tresnet bench report: begin -->"
END = "<!-- tresnet bench report: end -->"


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Draw tables and pictures from records; a section for each device and PyTorch version."""

    records: Path = Path("benchmarks/records")
    """Folder of the records."""

    into: Path | None = None
    """Markdown file whose text between the two marker comments is replaced; by default the report
    is printed."""

    pictures: Path | None = None
    """Existing folder for the pictures: images/s against ImageNet top-1, and memory against batch
    size. By default none are drawn."""

    picture_format: Literal["svg", "png"] = "svg"
    """Format of the pictures."""

    def run(self, argv: list[str]) -> int:
        """Read the records, draw the pictures, write the tables."""
        from tresnet.errors import InputError
        from tresnet.measure.read_records import read_records
        from tresnet.measure.report import DRAWN, section_markdown, sections

        around = None if self.into is None else _around_report(self.into)
        if self.pictures is not None and not self.pictures.is_dir():
            raise InputError(f"expected an existing folder, got {self.pictures}: create it first")
        broken: list[str] = []
        records = read_records(self.records, lambda error: broken.append(str(error)))
        for fault in broken:
            progress(f"warning: not drawn: {fault}")
        for record in records:
            if record.what not in DRAWN:
                progress(f"not drawn: {record.name}, a record of {record.what}")
        drawn = [record for record in records if record.what in DRAWN]
        if not drawn:
            raise InputError(
                f"expected records of {', '.join(DRAWN)} in {self.records}, found others only"
                + "".join(f"; {fault}" for fault in broken)
            )
        text = "\n\n".join(section_markdown(one, self._links(one)) for one in sections(drawn))
        if around is None or self.into is None:
            say(text)
        else:
            _replace(self.into, f"{around[0]}{BEGIN}\n\n{text}\n\n{END}{around[1]}")
        return 0

    def _links(self, section: "Section") -> list[str]:
        """Draw a section's pictures and return their Markdown, relative to the file it goes into."""
        from tresnet.measure.report_pictures import draw_pictures

        if self.pictures is None:
            return []
        base = Path.cwd() if self.into is None else self.into.resolve().parent
        links = []
        for path in draw_pictures(section, self.pictures, self.picture_format):
            what = path.name.partition("_")[0]
            relative = Path(os.path.relpath(path.resolve(), base)).as_posix()
            links.append(f"![{what}, {section.title}]({relative})")
            progress(f"picture: {path}")
        return links


def _around_report(path: Path) -> tuple[str, str]:
    """What stands before and after the markers of a file."""
    from tresnet.errors import InputError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"expected a Markdown file, got {path} ({error})") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise InputError(
            f"expected the lines {BEGIN} and {END} once each, in this order, in {path}"
        )
    return before, after


def _replace(path: Path, text: str) -> None:
    from tresnet.errors import InputError
    from tresnet.files import atomic_write

    try:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"expected a file that can be written, got {path} ({error})") from error
    progress(f"report: {path}")
