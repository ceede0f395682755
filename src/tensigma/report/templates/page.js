"use strict";
// Light or dark: the reader's system decides until the button is pressed.
{
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  // Pages opened from a disk may have no storage of their own.
  try { const kept = localStorage.getItem("tensigma-theme"); if (kept) root.dataset.theme = kept; } catch { /* none */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("tensigma-theme", root.dataset.theme); } catch { /* none */ }
    say();
  });
  system.addEventListener("change", say);
  button.hidden = false;
  say();
}

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
