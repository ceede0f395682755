"use strict";
// Tables sort by the column whose name is pressed, and the other way round when it is pressed again.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const numeric = head.classList.contains("number");
    const valueOf = (row) => {
      const cell = row.cells[index];
      if (!numeric) return cell.textContent.trim();
      // Empty values stay at the end, whichever way the rest is sorted.
      return cell.dataset.value === "" ? null : Number(cell.dataset.value);
    };
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const sign = descending ? -1 : 1;
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((first, second) => {
        const a = valueOf(first), b = valueOf(second);
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (numeric ? a - b : a.localeCompare(b, undefined, { numeric: true }));
      });
      body.append(...rows);
    });
  });
}
