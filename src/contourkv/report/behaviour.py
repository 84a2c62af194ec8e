"""The page's script: tables sort by their headers, verdicts are filtered, figures open large. It fetches nothing."""

SCRIPT = """
"use strict";
const numbers = (row, column) => {
  const text = row.cells[column].textContent.replaceAll(",", "").trim();
  return text === "inf" ? Infinity : parseFloat(text);
};
const texts = (row, column) => row.cells[column].textContent.trim();
const unknown = (value) => Number.isNaN(value) || value === "" || value === "\\u2013";
const words = new Intl.Collator("en", { numeric: true });

function sort(header) {
  const table = header.closest("table");
  const column = header.cellIndex;
  const value = header.classList.contains("n") ? numbers : texts;
  const order = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  const sign = order === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const keyed = Array.from(body.rows, (row) => [value(row, column), row]);
  keyed.sort(([a], [b]) => {
    // What is not known stays at the end, whichever way the rest goes.
    if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);
    if (a === b) return 0;
    return sign * (typeof a === "string" ? words.compare(a, b) : a < b ? -1 : 1);
  });
  body.append(...keyed.map(([, row]) => row));
  if (table.dataset.first) shorten(table);
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
}

// Of a long table the first rows are laid out, in whatever order, until all are asked for.
const FIRST = 200;
function shorten(table) {
  Array.from(table.tBodies[0].rows).forEach((row, index) => { row.hidden = index >= table.dataset.first; });
}
for (const table of document.querySelectorAll("details table")) {
  const rows = table.tBodies[0].rows.length;
  if (rows <= FIRST) continue;
  table.dataset.first = FIRST;
  shorten(table);
  const all = document.createElement("button");
  all.type = "button";
  all.className = "all";
  all.textContent = "Show all " + rows.toLocaleString("en") + " rows, not only the first " + FIRST;
  all.addEventListener("click", () => {
    table.dataset.first = rows;
    shorten(table);
    table.parentElement.focus();
    all.remove();
  });
  table.parentElement.after(all);
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}

for (const form of document.querySelectorAll(".filters")) {
  const rows = Array.from(document.getElementById(form.dataset.table).tBodies[0].rows);
  const choices = form.querySelectorAll("select");
  const shown = form.querySelector("output");
  const filter = () => {
    let count = 0;
    for (const row of rows) {
      row.hidden = Array.from(choices).some(({ name, value }) => value && row.dataset[name] !== value);
      count += !row.hidden;
    }
    shown.textContent = count + " of " + rows.length + " rows";
  };
  form.addEventListener("change", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
}

const dialog = document.querySelector("dialog");
const stage = dialog.querySelector(".stage");
const fit = dialog.querySelector(".size");
function resize(whole) {
  stage.classList.toggle("fit", whole);
  fit.textContent = whole ? "Full size" : "Fit to window";
}
for (const button of document.querySelectorAll(".zoom")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img").cloneNode();
    image.removeAttribute("width");
    image.removeAttribute("height");
    stage.replaceChildren(image);
    dialog.querySelector("p").textContent = button.dataset.title;
    resize(false);
    dialog.showModal();
    stage.scrollTo(0, 0);
    stage.focus();
  });
}
fit.addEventListener("click", () => resize(!stage.classList.contains("fit")));
dialog.querySelector(".close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => stage.replaceChildren());
"""
