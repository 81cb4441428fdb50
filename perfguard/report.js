// The table of trials: sorted by its header's buttons, filtered by outcome and by words.
const body = document.querySelector("#trials tbody");
if (body) {
  const rows = [...body.rows];
  const heads = [...document.querySelectorAll("#trials thead th")];
  const outcome = document.getElementById("outcome");
  const words = document.getElementById("words");
  const shown = document.getElementById("shown");

  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.innerText.toLowerCase();
      row.hidden = Boolean(outcome.value && row.dataset.outcome !== outcome.value) || !wanted.every(word => text.includes(word));
    }
    shown.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} trials shown`;
  };

  // Numbers are compared as numbers; a cell that has none stays at the end, whatever the direction.
  const sort = (column, falling) => {
    const key = row => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.innerText : cell.dataset.value === "" ? null : Number(cell.dataset.value);
    };
    const keyed = rows.map(row => [key(row), row]);
    keyed.sort(([a], [b]) => (a === null || b === null) ? (a === null) - (b === null) : (a < b ? -1 : a > b ? 1 : 0) * (falling ? -1 : 1));
    body.append(...keyed.map(([, row]) => row));
    heads.forEach((head, index) => head.setAttribute("aria-sort", index !== column ? "none" : falling ? "descending" : "ascending"));
  };

  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === "ascending")));
  outcome.addEventListener("change", filter);
  words.addEventListener("input", filter);
  document.getElementById("filters").hidden = false;
  filter();
}
