"use strict";
// Tables that can be sorted by any column and filtered by name and kind, with the keyboard too.

function sortTable(table, column, direction) {
  const body = table.tBodies[0];
  const key = (row) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.toLowerCase();
  };
  const rows = [...body.rows].map((row) => [key(row), row]);
  rows.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0) * direction);
  body.append(...rows.map(([, row]) => row));
  table.querySelectorAll("th").forEach((heading, place) => {
    if (place === column) heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else heading.removeAttribute("aria-sort");
  });
}

function filterTable(id) {
  const words = document.querySelector(`[data-filter="${id}"]`).value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = document.querySelector(`[data-kind="${id}"]`)?.value || "";
  let shown = 0;
  for (const row of document.getElementById(`table-${id}`).tBodies[0].rows) {
    const name = (row.querySelector("td.name span") || row.lastElementChild).textContent.toLowerCase();
    row.hidden = !(words.every((word) => name.includes(word)) && (!kind || row.dataset.kind === kind));
    shown += !row.hidden;
  }
  document.getElementById(`count-${id}`).value = `${shown} row${shown === 1 ? "" : "s"}`;
}

// Bring a row into view, whatever is filtered, and mark it.
function showRow(row) {
  const table = row.closest("table");
  const filter = document.querySelector(`[data-filter="${table.id.replace("table-", "")}"]`);
  if (row.hidden && filter) {
    filter.value = "";
    const kind = document.querySelector(`[data-kind="${filter.dataset.filter}"]`);
    if (kind) kind.value = "";
    filterTable(filter.dataset.filter);
  }
  for (const marked of document.querySelectorAll("tr.chosen")) marked.classList.remove("chosen");
  row.classList.add("chosen");
  row.closest("details")?.setAttribute("open", "");
  row.scrollIntoView({ block: "center" });
  row.tabIndex = -1;
  row.focus({ preventScroll: true });
}

function connectTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    table.tHead.addEventListener("click", (event) => {
      const heading = event.target.closest("th");
      if (!heading) return;
      const numbers = "value" in (table.tBodies[0].rows[0]?.cells[heading.cellIndex].dataset || {});
      // Numbers from the most, names from A, and a second click turns either round.
      const now = heading.getAttribute("aria-sort");
      const direction = now === "descending" ? 1 : now === "ascending" ? -1 : numbers ? -1 : 1;
      sortTable(table, heading.cellIndex, direction);
    });
    const id = table.id.replace("table-", "");
    document.querySelector(`[data-filter="${id}"]`).addEventListener("input", () => filterTable(id));
    document.querySelector(`[data-kind="${id}"]`)?.addEventListener("change", () => filterTable(id));
    document.querySelector(`[data-full="${id}"]`).addEventListener("change", (event) => {
      table.classList.toggle("full", event.target.checked);
    });
  }
}
