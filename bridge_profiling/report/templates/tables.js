"use strict";
// Tables that can be sorted by any column and filtered by name and kind, with the keyboard too. Of a long table, the document
// holds the rows that were scrolled to: laying out ten thousand rows takes a second, and sorting them a hundredth of that.

const ROWS = 150; // that a long table shows at first, and adds when its end comes near

const longTables = new Map(); // table -> all rows in their order, those that are not in the document yet, and keys by column

function rowsOf(table) {
  return longTables.get(table)?.rows || [...table.tBodies[0].rows];
}

// Shows the first rows of those that the filter leaves.
function showRows(table, count = ROWS) {
  const long = longTables.get(table);
  const left = long.rows.filter((row) => !row.hidden);
  table.tBodies[0].replaceChildren(...left.slice(0, count));
  long.more = left.slice(count);
}

function addRows(table) {
  table.tBodies[0].append(...longTables.get(table).more.splice(0, ROWS));
}

function keepLong(table) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length <= 2 * ROWS) return;
  longTables.set(table, { rows, more: [], keys: new Map() });
  showRows(table);
  const scrolled = table.parentElement;
  scrolled.addEventListener("scroll", () => {
    if (scrolled.scrollTop + 2 * scrolled.clientHeight > scrolled.scrollHeight) addRows(table);
  });
}

function keysOf(rows, column) {
  return new Map(
    rows.map((row) => {
      const cell = row.cells[column];
      return [row, "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.toLowerCase()];
    }),
  );
}

function sortTable(table, column, direction) {
  const long = longTables.get(table);
  const rows = rowsOf(table);
  const keys = long?.keys.get(column) || keysOf(rows, column);
  long?.keys.set(column, keys);
  const order = (one, other) => (one < other ? -1 : one > other ? 1 : 0) * direction;
  rows.sort((one, other) => order(keys.get(one), keys.get(other)));
  if (long) showRows(table);
  else table.tBodies[0].append(...rows);
  table.querySelectorAll("th").forEach((heading, place) => {
    if (place === column) heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else heading.removeAttribute("aria-sort");
  });
}

function filterTable(id) {
  const words = document.querySelector(`[data-filter="${id}"]`).value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = document.querySelector(`[data-kind="${id}"]`)?.value || "";
  const table = document.getElementById(`table-${id}`);
  let shown = 0;
  for (const row of rowsOf(table)) {
    const name = (row.querySelector("td.name span") || row.lastElementChild).textContent.toLowerCase();
    row.hidden = !(words.every((word) => name.includes(word)) && (!kind || row.dataset.kind === kind));
    shown += !row.hidden;
  }
  if (longTables.has(table)) showRows(table);
  document.getElementById(`count-${id}`).value = `${shown} row${shown === 1 ? "" : "s"}`;
}

// Bring a row of a table into view, whatever is filtered, and mark it.
function showRow(table, row) {
  const filter = document.querySelector(`[data-filter="${table.id.replace("table-", "")}"]`);
  if (row.hidden && filter) {
    filter.value = "";
    const kind = document.querySelector(`[data-kind="${filter.dataset.filter}"]`);
    if (kind) kind.value = "";
    filterTable(filter.dataset.filter);
  }
  if (!row.isConnected) showRows(table, longTables.get(table).rows.indexOf(row) + ROWS);
  for (const marked of document.querySelectorAll("tr.chosen")) marked.classList.remove("chosen");
  row.classList.add("chosen");
  row.closest("details")?.setAttribute("open", "");
  row.scrollIntoView({ block: "center" });
  row.tabIndex = -1;
  row.focus({ preventScroll: true });
}

function connectTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    keepLong(table);
    table.tHead.addEventListener("click", (event) => {
      const heading = event.target.closest("th");
      if (!heading) return;
      const numbers = "value" in (rowsOf(table)[0]?.cells[heading.cellIndex].dataset || {});
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
