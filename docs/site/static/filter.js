// A box above each long table of the reference: rows that have none of its words are hidden.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.searchable")) {
    const box = document.createElement("input");
    box.type = "search";
    box.className = "filter";
    box.placeholder = "filter the table: pipe remat";
    box.setAttribute("aria-label", "filter the table");
    const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const [row, text] of rows) row.hidden = !words.every((word) => text.includes(word));
    });
    (table.closest(".table-wrapper") || table).before(box);
  }
});
