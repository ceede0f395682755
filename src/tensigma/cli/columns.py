"""Widths of the columns of a table on a narrow terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

GAP = 2
# The narrowest column for sentences: in a narrower one they would fill half a screen.
_SENTENCE = 24
# The narrowest column for names that have to be folded.
_NAME = 8


@dataclass(frozen=True)
class Layout:
    """A table as it will be drawn."""

    header: list[str]
    rows: list[list[str]]
    #: Columns of numbers, which are aligned right.
    right: frozenset[int]
    widths: list[int]
    #: Lines below the table, to which marks in it refer.
    notes: list[str]


def arrange(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int],
    room: int,
    remarks: int | None = None,
    marked: int | None = None,
) -> Layout:
    """Fit a table into ``room`` characters without breaking names or words, if possible.

    These steps are tried in turn: break headers at blanks and narrow the column ``remarks``, unless that repeats the
    same sentence over several lines; move the remarks below the table, each text once, with marks in the column
    ``marked``; wrap other texts at blanks; wrap numbers at blanks; fold names.

    >>> layout = arrange(["layer", "why"], [["conv1", "it is small"], ["fc", "it is small"]], right=(), room=12,
    ...                  remarks=1)
    >>> layout.rows, layout.notes
    ([['conv1', '(1)'], ['fc', '(1)']], ['(1) it is small'])
    """
    whole = Layout(list(header), [list(row) for row in rows], frozenset(right), [], [])
    layout = _broken(whole)
    steps: list[tuple[Layout, list[int]]] = [(whole, []), (layout, [] if remarks is None else [remarks])]
    if remarks is not None:
        layout = _broken(_below(whole, remarks, remarks if marked is None else marked))
        steps.append((layout, []))
    for step, soft in steps:
        widths = _fitted(step, soft, room, least=_SENTENCE)
        if _total(widths) <= room and not any(_repeats(step, index, widths[index]) for index in soft):
            return replace(step, widths=widths)
    columns = range(len(layout.header))
    widths = _fitted(layout, [index for index in columns if index not in layout.right], room)
    if _total(widths) > room:
        widths = _fitted(layout, columns, room)
    if _total(widths) > room:
        widths[0] = max(min(_NAME, widths[0]), room - (_total(widths) - widths[0]))
    return replace(layout, widths=widths)


def _repeats(layout: Layout, column: int, width: int) -> bool:
    """Whether a text that has to be wrapped occurs more than once."""
    wrapped = [row[column] for row in layout.rows if cell_len(row[column]) > width]
    return len(wrapped) > len(set(wrapped))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _fitted(layout: Layout, soft: Collection[int], room: int, least: int = 0) -> list[int]:
    """Natural widths, except that columns in ``soft`` are narrowed, the widest first, down to their longest word."""
    columns = list(zip(layout.header, *layout.rows, strict=True))
    widths = [max(_longest(cell.split("\n")) for cell in column) for column in columns]
    floors = [max(least, *(_longest(cell.split()) for cell in column)) for column in columns]
    while _total(widths) > room:
        narrowable = [index for index in soft if widths[index] > floors[index]]
        if not narrowable:
            break
        widths[max(narrowable, key=lambda index: widths[index])] -= 1
    return widths


def _longest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _broken(layout: Layout) -> Layout:
    """The headers of number columns broken at blanks."""
    header = [name.replace(" ", "\n") if index in layout.right else name for index, name in enumerate(layout.header)]
    return replace(layout, header=header)


def _below(layout: Layout, remarks: int, marked: int) -> Layout:
    """The remarks below the table, each text once."""
    texts = list(dict.fromkeys(row[remarks] for row in layout.rows if row[remarks]))
    rows = []
    for row in layout.rows:
        mark = f"({texts.index(row[remarks]) + 1})" if row[remarks] else ""
        new = list(row)
        new[remarks] = ""
        new[marked] = f"{new[marked]} {mark}".strip()
        rows.append(new)
    header, right = layout.header, layout.right
    if marked != remarks:
        header, rows = _without(header, remarks), [_without(row, remarks) for row in rows]
        right = frozenset(index - (index > remarks) for index in right)
    return replace(
        layout, header=header, rows=rows, right=right, notes=[f"({i}) {text}" for i, text in enumerate(texts, start=1)]
    )


def _without(cells: Sequence[str], index: int) -> list[str]:
    return [*cells[:index], *cells[index + 1 :]]
